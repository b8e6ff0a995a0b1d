"""Captured tiny models, one capture a family and test session (tests that edit a graph clone it)."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import pytest

from moec.checkpoint import Checkpoint, open_checkpoint
from moec.frontend import Captured, capture
from tests.helpers.tiny import tiny_checkpoint

BATCH, CONTEXT = 2, 64
OVERRIDES = {"llama4_text": dict(num_experts_per_tok=1)}


@cache
def checkpoint(family: str, seed: int = 0) -> Checkpoint:
    """A tiny random checkpoint of the family, opened; the folder is removed at exit."""
    folder = tempfile.TemporaryDirectory(prefix=f"moec-{family}-")
    _FOLDERS.append(folder)
    path = tiny_checkpoint(Path(folder.name), family, seed=seed, tokenizer=False, **OVERRIDES.get(family, {}))
    return open_checkpoint(path)


_FOLDERS: list[tempfile.TemporaryDirectory] = []


@cache
def captured(family: str, seed: int = 0) -> Captured:
    """Its exported graph for 2 slots of 64 tokens."""
    return capture(checkpoint(family, seed), BATCH, CONTEXT)


FAMILIES = ("qwen2_moe", "gpt_oss", "deepseek_v3")
"""Families of the default run: plain; sinks, window, biases; latent attention, expert groups."""

MORE_FAMILIES = (
    "mixtral", "qwen3_moe", "olmoe", "deepseek_v2", "granitemoe", "glm4_moe", "phimoe", "minimax_m2",
    "ernie4_5_moe", "llama4_text",
)  # fmt: skip
"""Families of the slow test run."""

ALL_FAMILIES = [*FAMILIES, *(pytest.param(f, marks=pytest.mark.slow) for f in MORE_FAMILIES)]
