"""Calibration text: files to windows of token ids."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from moec.errors import MoecError

DEFAULT_TEXT = Path(__file__).with_name("default.txt")
WINDOW = 512
MAX_WINDOWS = 16
HELD_BACK_WINDOW = 1024
_MAX_HELD_BACK = 4 * HELD_BACK_WINDOW
_MAX_CHARACTERS = 4_000_000


def read_text(files: Sequence[str | Path] | None) -> str:
    """The text of the files, or the text that is shipped with moec.

    Raises:
        MoecError: a file is missing, not UTF-8 text, or all are empty.
    """
    paths = [Path(f) for f in files] if files else [DEFAULT_TEXT]
    text = "\n\n".join(_read(path) for path in paths)
    if not text.strip():
        raise MoecError("The calibration text is empty", where=", ".join(map(str, paths)))
    return text


def _read(path: Path) -> str:
    try:
        with path.open(encoding="utf-8") as file:
            return file.read(_MAX_CHARACTERS)
    except UnicodeDecodeError:
        raise MoecError("A calibration file is not UTF-8 text", where=str(path)) from None
    except OSError as error:
        raise MoecError(f"A calibration file cannot be read: {error.strerror}", where=str(path)) from None


def tokenize(folder: Path, text: str) -> list[int]:
    """Token ids of the text by the checkpoint's own tokenizer.

    Raises:
        MoecError: the checkpoint has no usable tokenizer.
    """
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True)
    except Exception as error:  # transformers raises many types here
        what = f"The checkpoint's tokenizer cannot be loaded: {str(error).splitlines()[0]}"
        hint = "Calibration needs it. --kv fp16 builds without a calibration."
        raise MoecError(what, where=str(folder), hint=hint) from None
    return tokenizer(text, verbose=False)["input_ids"]


def divide(ids: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """What is calibrated on, and the last fifth (at most 4096 tokens), which checks are made on.

    A text of less than two windows serves for both.
    """
    held_back = min(len(ids) // 5, _MAX_HELD_BACK)
    if len(ids) < 2 * WINDOW:
        return ids, ids
    return ids[:-held_back], ids[-held_back:]


def windows(ids: Sequence[int], size: int, vocab_size: int, limit: int = MAX_WINDOWS) -> list[np.ndarray]:
    """Windows of `size` tokens, int64 each, at most `limit` of them, evenly spread over the text.

    A text shorter than one window is one short window.

    Raises:
        MoecError: the tokenizer gives ids that the model has no embedding for.
    """
    tokens = np.asarray(ids, np.int64)
    if tokens.size and tokens.max() >= vocab_size:
        what = f"The tokenizer gives token {tokens.max()}, the model has {vocab_size} only"
        raise MoecError(what, hint="Does the tokenizer belong to this checkpoint?")
    count = max(1, tokens.size // size)
    chosen = np.unique(np.linspace(0, count - 1, min(count, limit)).round().astype(int))
    return [tokens[i * size : (i + 1) * size] for i in chosen]
