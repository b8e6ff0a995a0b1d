"""Bundles of the tiny checkpoint, built once a test run."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path
from typing import Any

from moec.builder import build
from tests.helpers.tiny import shakespeare, tiny_checkpoint

_FOLDER = tempfile.TemporaryDirectory(prefix="moec-test-")  # removed when the interpreter ends


@cache
def checkpoint(family: str = "qwen2_moe", seed: int = 0) -> Path:
    """A tiny checkpoint folder."""
    return tiny_checkpoint(Path(_FOLDER.name) / f"{family}-{seed}", family, seed=seed)


@cache
def tiny_bundle(family: str = "qwen2_moe", **options: Any) -> Path:
    """A bundle of `checkpoint(family)`; options as in `moec.build`. Do not write into it: tests share it."""
    name = "-".join([family, *(f"{key}={value}" for key, value in sorted(options.items()))])
    text = Path(_FOLDER.name) / "calibration.txt"
    text.write_text(shakespeare(8_000))
    options = {"target": "cpu"} | options
    build(checkpoint(family), Path(_FOLDER.name) / name, calibration=text, **options)
    return Path(_FOLDER.name) / name
