"""Vectorised attention over a cache against the reference operator, token by token."""

from __future__ import annotations

import numpy as np
import pytest

from moec.bundle.geometry import AttentionLayer
from moec.calibrate.simulate import cached_attention, query_runs
from moec.reference.attention import asym_kv_attention
from moec.reference.kv_cache import Calibration, KVLayout, KVState
from tests.helpers.attention_case import AttentionCase
from tests.helpers.rng import fresh_rng

CASES = [  # format, dims, kv heads, heads, softcap, sink logits
    ("mkv2", (64, 64), 2, 4, 0.0, False),
    ("mkv2_lean", (80, 48), 1, 3, 0.0, True),
    ("k4v2", (32, 32), 2, 2, 8.0, False),
    ("int8", (48, 80), 1, 2, 0.0, True),
    ("fp16", (64, 64), 1, 2, 0.0, True),
]


@pytest.mark.parametrize(("format", "dims", "kv_heads", "heads", "softcap", "sinks"), CASES)
@pytest.mark.parametrize("tokens", [9, 144, 290])
def test_equals_the_reference(format, dims, kv_heads, heads, softcap, sinks, tokens):
    layout = KVLayout(format, kv_heads, *dims, 400)
    case = AttentionCase(fresh_rng(), layout, heads, softcap=softcap, has_sink_logits=int(sinks))
    q, k, v = case.tokens(1, tokens)
    state = KVState.empty(layout, 1)
    tensors = case.inputs(q, k, v, [0], [tokens]) | {
        "blocks": state.blocks, "ring": state.ring, "lengths": np.zeros(1, np.int32),
    }  # fmt: skip
    want, *_ = asym_kv_attention(**tensors, **case.attributes)
    layer = AttentionLayer(0, heads, kv_heads, *dims, case.attributes["scale"], 0, softcap, sinks)
    names = ("k_mean", "k_ref", "k_order", "v_ref")
    calibration = Calibration(*(case.calibration[n] for n in names))
    logits = case.calibration["sink_logits"] if sinks else None
    got = cached_attention(layer, layout, calibration, *(x[0].swapaxes(0, 1) for x in (q, k, v)), logits)
    want = want.reshape(tokens, heads, dims[1])
    assert np.abs(got.swapaxes(0, 1) - want).max() <= 2e-5 * np.abs(want).max()


def test_runs_end_where_a_block_is_flushed():
    layout = KVLayout("mkv2", 1, 64, 64, 400)
    assert list(query_runs(layout, 300)) == [(0, 144), (144, 208), (208, 272), (272, 300)]
    assert list(query_runs(layout, 5)) == [(0, 5)]
    assert list(query_runs(KVLayout("fp16", 1, 64, 64, 400), 600)) == [(0, 512), (512, 600)]
