"""The sample checkpoint for tests, and bundles made of it, built once and kept under build/."""

from __future__ import annotations

from functools import cache
from pathlib import Path

REPO = Path(__file__).parents[2]
CHECKPOINT = REPO / "samples" / "smolmoe" / "checkpoint"


@cache
def sample_checkpoint() -> Path:
    """Folder of the Qwen2-MoE sample; made first where it is missing (a minute)."""
    if not (CHECKPOINT / "config.json").exists():
        from samples.smolmoe.make_checkpoint import make

        make(CHECKPOINT)
    return CHECKPOINT


@cache
def sample_tokenizer():
    """The sample's own tokenizer, as a `tokenizers.Tokenizer`."""
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(sample_checkpoint() / "tokenizer.json"))
