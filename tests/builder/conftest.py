"""One tiny checkpoint and short calibration text for the tests of this folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.helpers.tiny import shakespeare, tiny_checkpoint


@pytest.fixture(scope="session")
def checkpoint_folder(tmp_path_factory) -> Path:
    return tiny_checkpoint(tmp_path_factory.mktemp("builder") / "model", seed=11)


@pytest.fixture(scope="session")
def text_file(tmp_path_factory) -> Path:
    path = tmp_path_factory.mktemp("builder-text") / "text.txt"
    path.write_text(shakespeare(1500), encoding="utf-8")
    return path
