from __future__ import annotations

import numpy as np
import pytest

from moec.reference.attention import asym_kv_attention
from moec.reference.kv_cache import KVLayout
from tests.helpers.attention_case import AttentionCase
from tests.helpers.rng import fresh_rng
from tests.helpers.single_op import FunctionOp

VARIANTS = {
    "mkv2": ("mkv2", (64, 64), 2, 4, {}, {}),
    "lean, group 3": ("mkv2_lean", (80, 80), 1, 3, {}, {"has_sink_logits": 1}),
    "k4v2, Dk != Dv": ("k4v2", (32, 48), 2, 2, {}, {}),
    "int8": ("int8", (48, 80), 1, 2, {"rollback_tokens": 5}, {"has_sink_logits": 1}),
    "soft cap, GQA 8": ("mkv2", (96, 64), 1, 8, {}, {"softcap": 15.0}),
    "head_dim 256": ("mkv2", (256, 256), 1, 2, {}, {}),
    "other sizes": (
        "mkv2",
        (16, 20),
        1,
        1,
        {"sink_tokens": 0, "recent_tokens": 40, "rollback_tokens": 9},
        {},
    ),
    "fp16": ("fp16", (64, 64), 2, 4, {}, {"softcap": 20.0, "has_sink_logits": 1}),
    "fp32": ("fp32", (64, 32), 2, 4, {}, {"has_sink_logits": 1}),
    "window": ("mkv2", (64, 64), 2, 4, {"window": 40, "rollback_tokens": 3}, {"has_sink_logits": 1}),
    "fp32 window": ("fp32", (32, 32), 1, 2, {"window": 33}, {}),
    "window beyond the context": ("fp16", (32, 32), 1, 2, {"window": 4000}, {}),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_equals_the_reference_over_chunks(variant):
    format, dims, heads, queries, sizes, attributes = VARIANTS[variant]
    layout = KVLayout(format, heads, *dims, 400, **sizes)
    theirs = AttentionCase(fresh_rng(), layout, queries, **attributes)
    ours = theirs.twin()
    function = FunctionOp("AsymKVAttention", **ours.attributes)
    chunks = [(1, [1, 0]), (100, [100, 37]), (63, [1, 63]), (64, [64, 64]), (130, [130, 100]), (1, [1, 1])]
    for steps, counts in chunks:
        q, k, v = theirs.tokens(2, steps)
        for row, count in enumerate(counts):
            k[row, count:], v[row, count:] = np.nan, np.nan
        want = theirs.run(asym_kv_attention, q, k, v, slots=[2, 0], counts=counts)
        got = ours.run(lambda **given: _outputs(function, given), q, k, v, slots=[2, 0], counts=counts)
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
        assert ours.state_bytes() == theirs.state_bytes()


def _outputs(function: FunctionOp, given: dict) -> list[np.ndarray]:
    return function(**{name: x for name, x in given.items() if isinstance(x, np.ndarray)})


def test_rolled_back_tokens_are_rewritten():
    layout = KVLayout("mkv2", 1, 32, 32, 400, rollback_tokens=9)
    theirs = AttentionCase(fresh_rng(), layout, 2)
    ours = theirs.twin()
    function = FunctionOp("AsymKVAttention", **ours.attributes)
    for steps, back in ((149, 9), (12, 0)):
        q, k, v = theirs.tokens(1, steps)
        want = theirs.run(asym_kv_attention, q, k, v, slots=[1], counts=[steps])
        got = ours.run(lambda **given: _outputs(function, given), q, k, v, slots=[1], counts=[steps])
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
        assert ours.state_bytes() == theirs.state_bytes()
        theirs.lengths[1] -= back
        ours.lengths[1] -= back


def test_garbage_behind_the_length_and_infinite_inputs_do_no_harm():
    layout = KVLayout("mkv2", 1, 64, 64, 400)
    theirs = AttentionCase(fresh_rng(), layout, 2)
    theirs.ring[:], theirs.blocks[:] = np.nan, -1
    ours = theirs.twin()
    q, k, v = theirs.tokens(1, 150)
    k[0, 30, 0, :2], v[0, 40, 0, :2] = [np.inf, -3e38], [-np.inf, 3e38]
    want = theirs.run(asym_kv_attention, q, k, v, slots=[0], counts=[150])
    function = FunctionOp("AsymKVAttention", **ours.attributes)
    got = ours.run(lambda **given: _outputs(function, given), q, k, v, slots=[0], counts=[150])
    assert np.isfinite(got).all()
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()
    assert np.array_equal(ours.blocks, theirs.blocks)
    assert np.array_equal(ours.ring, theirs.ring, equal_nan=True)


def test_an_idle_row_may_name_the_slot_of_another():
    case = AttentionCase(fresh_rng(), KVLayout("mkv2", 1, 32, 32, 400), 2)
    twin = case.twin()
    function = FunctionOp("AsymKVAttention", **case.attributes)
    q, k, v = case.tokens(3, 20)
    out = case.run(lambda **g: _outputs(function, g), q, k, v, slots=[1, 1, 1], counts=[0, 20, 0])
    one = [x[1:2] for x in (q, k, v)]
    want = twin.run(asym_kv_attention, *one, slots=[1], counts=[20])
    assert np.abs(out[1] - want[0]).max() <= 1e-5 * np.abs(want).max()
    assert case.state_bytes() == twin.state_bytes()
