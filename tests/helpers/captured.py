"""Captured tiny models, one capture a family and test session (tests that edit a graph clone it)."""

from __future__ import annotations

import tempfile
from functools import cache
from pathlib import Path

import onnx_ir as ir
import pytest

from moec.checkpoint import Checkpoint, open_checkpoint
from moec.frontend import Captured, capture
from moec.reference.kv_layout import KVLayout
from moec.rewrite import MOEC_PASSES, RewriteContext, run
from tests.helpers.families import NAMED, OVERRIDES
from tests.helpers.tiny import tiny_checkpoint

BATCH, CONTEXT = 2, 64


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


@cache
def rewritten(family: str) -> ir.Graph:
    """That graph with moec's operators, none of them merged for the CPU."""
    exported = captured(family)
    layouts = {
        a.layer: KVLayout("fp32", a.num_kv_heads, a.k_dim, a.v_dim, CONTEXT, a.window)
        for a in exported.geometry.attention
    }
    model = exported.model.clone()
    run(model, RewriteContext(exported.geometry, layouts), passes=MOEC_PASSES)
    return model.graph


FAMILIES = ("qwen2_moe", "gpt_oss", "deepseek_v3")
"""Families of the default run: plain; sinks, window, biases; latent attention, expert groups."""

MORE_FAMILIES = tuple(f for f in NAMED if f not in FAMILIES)
"""Families of the slow test run."""

ALL_FAMILIES = [*FAMILIES, *(pytest.param(f, marks=pytest.mark.slow) for f in MORE_FAMILIES)]
