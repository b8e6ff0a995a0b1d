"""Calibration text becomes evenly spread windows; unusable text is one clear message."""

from __future__ import annotations

import numpy as np
import pytest

from moec.calibrate.text import DEFAULT_TEXT, read_text, tokenize, windows
from moec.errors import MoecError
from tests.helpers.tiny import shakespeare, tiny_tokenizer


def test_files_are_joined(tmp_path):
    (tmp_path / "a").write_text("one")
    (tmp_path / "b").write_text("two é", encoding="utf-8")
    assert read_text([tmp_path / "a", str(tmp_path / "b")]) == "one\n\ntwo é"


def test_the_shipped_text_is_used_and_is_not_evaluation_text():
    text = read_text(None)
    assert len(text) > 20_000
    assert DEFAULT_TEXT.is_file()
    lines = {line.strip() for line in shakespeare(200_000).splitlines() if len(line) > 40}
    assert not lines & {line.strip() for line in text.splitlines()}


def test_unusable_files(tmp_path):
    with pytest.raises(MoecError, match="No such file"):
        read_text([tmp_path / "missing"])
    (tmp_path / "binary").write_bytes(b"\xff\xfe\xff")
    with pytest.raises(MoecError, match="not UTF-8"):
        read_text([tmp_path / "binary"])
    (tmp_path / "empty").write_text(" \n")
    with pytest.raises(MoecError, match="empty"):
        read_text([tmp_path / "empty"])


def test_windows_are_spread_over_the_text():
    got = windows(range(1000), 10, 2000, limit=4)
    assert [w[0] for w in got] == [0, 330, 660, 990]
    assert all(len(w) == 10 for w in got)
    assert [w.tolist() for w in windows([5, 6], 10, 9)] == [[5, 6]]
    assert len(windows(range(35), 10, 99)) == 3
    assert windows(range(35), 10, 99)[0].dtype == np.int64


def test_a_foreign_tokenizer_is_noticed():
    with pytest.raises(MoecError, match="token 9, the model has 9 only"):
        windows([1, 9], 10, 9)


def test_tokenize_uses_the_checkpoint(tmp_path):
    tiny_tokenizer().save_pretrained(tmp_path)
    ids = tokenize(tmp_path, "Thunder and lightning.")
    assert tiny_tokenizer().decode(ids) == "Thunder and lightning."


def test_a_checkpoint_without_tokenizer(tmp_path):
    with pytest.raises(MoecError, match="tokenizer cannot be loaded"):
        tokenize(tmp_path, "x")
