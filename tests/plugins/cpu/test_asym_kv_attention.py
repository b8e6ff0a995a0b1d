"""The CPU attention operator against the NumPy reference: state bit-identical, outputs to fp32 rounding."""

import itertools

import numpy as np
import pytest

from moec.reference.attention import asym_kv_attention
from moec.reference.kv_cache import KVLayout, KVState
from tests.helpers.cpu_attention import AttentionCase, close
from tests.helpers.cpu_op import CpuOp

TOLERANCE = 1e-5


def same_state(a: KVState, b: KVState) -> None:
    np.testing.assert_array_equal(a.blocks, b.blocks)
    np.testing.assert_array_equal(a.ring.view(np.uint8), b.ring.view(np.uint8))


class Both:
    """Feeds the same tokens to the kernel (in place) and to the reference, and compares after each call."""

    def __init__(self, case: AttentionCase) -> None:
        self.case, self.op = case, CpuOp("AsymKVAttention", **case.attributes)
        self.kernel = case.state()
        self.truth = self.kernel.copy()

    def call(self, slots, counts, width=None, tolerance=TOLERANCE, edit=None, least=1e-30):
        tokens = self.case.tokens(len(slots), width or max(counts))
        if edit:
            edit(tokens)
        out = self.op(in_place=True, **self.case.inputs(tokens, self.kernel, slots, counts))[0]
        truth = self.case.inputs(tokens, self.truth, slots, counts)
        expected, self.truth.blocks, self.truth.ring = asym_kv_attention(**truth, **self.op.attributes)
        same_state(self.kernel, self.truth)
        close(out, expected, tolerance, least)
        self.case.advance(slots, counts)
        return out


SHAPES = [  # format, query heads, kv heads, k_dim, v_dim
    ("mkv2", 9, 3, 64, 64),
    ("mkv2", 4, 4, 128, 128),
    ("mkv2", 8, 1, 96, 96),
    ("mkv2", 2, 1, 256, 256),
    ("mkv2", 5, 1, 80, 80),
    ("mkv2", 6, 1, 192, 128),
    ("mkv2", 2, 2, 16, 16),
    ("mkv2", 3, 1, 32, 48),
    ("mkv2", 2, 1, 20, 36),
    ("mkv2_lean", 16, 1, 64, 64),
    ("mkv2_lean", 2, 1, 80, 128),
    ("k4v2", 4, 2, 64, 64),
    ("int8", 9, 3, 64, 64),
    ("int8", 2, 1, 20, 80),
    ("fp16", 9, 3, 64, 64),
    ("fp32", 4, 1, 80, 20),
]


@pytest.mark.parametrize(("format", "heads", "kv_heads", "k_dim", "v_dim"), SHAPES)
def test_prefill_and_decode_across_block_boundaries(rng, format, heads, kv_heads, k_dim, v_dim):
    layout = KVLayout(format, kv_heads, k_dim, v_dim, 300)
    both = Both(AttentionCase(layout, heads, rng))
    for count in (1, 62, 1, 1, 64, 14, 1, 1, 63, 1, 1):
        both.call([0], [count])


@pytest.mark.parametrize("format", ["mkv2", "fp16", "fp32"])
def test_unequal_idle_and_padded_rows(rng, format):
    case = AttentionCase(KVLayout(format, 2, 64, 64, 400), 4, rng, batch=4)
    both = Both(case)
    both.call([2, 0, 1], [150, 40, 0], width=152)
    out = both.call([3, 1, 2, 0], [0, 7, 1, 120], width=121)
    assert not out[0].any()
    assert not out[1, 7:].any()
    for _ in range(3):
        both.call([0, 2, 1], [1, 1, 1])


@pytest.mark.parametrize(("format", "window", "rollback"), [("mkv2", 32, 0), ("fp16", 5, 3), ("fp32", 64, 8)])
def test_sliding_window(rng, format, window, rollback):
    layout = KVLayout(format, 2, 64, 64, 300, window=window, rollback_tokens=rollback)
    both = Both(AttentionCase(layout, 6, rng, batch=2))
    for count in (3, 1, 40, 1, 90, 1):
        both.call([1], [count])


@pytest.mark.parametrize("format", ["mkv2", "fp16"])
@pytest.mark.parametrize(("softcap", "sinks"), [(0.0, True), (20.0, False)])
def test_sink_logits_and_softcap(rng, format, softcap, sinks):
    case = AttentionCase(KVLayout(format, 2, 64, 64, 300), 8, rng, softcap=softcap, sink_logits=sinks)
    both = Both(case)
    for count in (1, 180, 1):
        both.call([0], [count])


def test_rollback_is_exact(rng):
    case = AttentionCase(KVLayout("mkv2", 1, 64, 64, 400, rollback_tokens=8), 2, rng)
    both = Both(case)
    both.call([0], [210])
    for back in (8, 3, 8):
        case.lengths[0] -= back
        both.call([0], [back + 1])


@pytest.mark.parametrize(("sinks", "recent"), [(0, 0), (4, 32), (16, 100)])
def test_other_sink_and_recent_sizes(rng, sinks, recent):
    layout = KVLayout("mkv2", 2, 64, 64, 400, sink_tokens=sinks, recent_tokens=recent)
    both = Both(AttentionCase(layout, 2, rng))
    for count in (190, 1, 65):
        both.call([0], [count])


def extreme_channels(tokens: dict) -> None:
    """Constant, huge, tiny, one-signed, infinite and zero channels and tokens."""
    k, v = tokens["k"], tokens["v"]
    k[..., 0] = 3.25
    k[..., 1] *= 1e6
    k[..., 2] *= 1e-7
    k[..., 3] = np.abs(k[..., 3]) + 100
    k[:, ::5, :, 4] = np.inf
    k[:, ::7, :, 5] = -np.inf
    k[..., 6] = 0
    k[..., 7] *= 1e-40
    v[:, 0::6] *= 1e5
    v[:, 1::6] *= 1e-8
    v[:, 2::6] = 0
    v[:, 3::6] = np.abs(v[:, 3::6]) * 1e-40
    v[:, 4::6, :, 3] = np.inf
    v[:, 5::6, :, 9] = -np.inf


@pytest.mark.parametrize("format", ["mkv2", "k4v2", "int8", "fp16"])
def test_extreme_values_pack_to_the_same_bits(rng, format):
    both = Both(AttentionCase(KVLayout(format, 2, 64, 64, 300), 2, rng))
    for count in (150, 1, 70):
        tokens = both.case.tokens(1, count)
        extreme_channels(tokens)
        both.op(in_place=True, **both.case.inputs(tokens, both.kernel, [0], [count]))
        truth = both.case.inputs(tokens, both.truth, [0], [count])
        _, both.truth.blocks, both.truth.ring = asym_kv_attention(**truth, **both.op.attributes)
        same_state(both.kernel, both.truth)
        both.case.advance([0], [count])


@pytest.mark.parametrize("scale", [1e-6, 1e-3, 1.0, 300.0])
def test_magnitudes_pack_to_the_same_bits(rng, scale):
    both = Both(AttentionCase(KVLayout("mkv2", 3, 64, 128, 600), 3, rng))

    def edit(tokens):
        tokens["k"] *= np.float32(scale)
        tokens["v"] *= np.float32(scale)
        tokens["q"] /= np.float32(max(scale, 1.0))

    # Until a block is full every term is as small as V. A block's smallest step is 2^-9 of V's reference:
    # however small V is, up to three steps and the zero that takes them back are added, and they round.
    both.call([0], [128], edit=edit)
    both.call([0], [272], edit=edit, least=3 * 2.0**-9 * both.case.calibration.v_ref.max())


CHUNKED = [  # format, query heads, kv heads, k_dim, v_dim, window
    ("mkv2", 6, 2, 64, 64, 0),
    ("mkv2", 1, 1, 80, 48, 0),
    ("mkv2_lean", 11, 1, 96, 128, 0),
    ("mkv2", 2, 2, 20, 36, 0),
    ("k4v2", 4, 2, 128, 64, 0),
    ("int8", 6, 2, 64, 48, 0),
    ("int8", 1, 1, 128, 128, 0),
    ("int8", 11, 1, 84, 20, 0),
    ("int8", 4, 2, 256, 192, 0),
    ("mkv2", 6, 2, 64, 64, 40),
    ("fp16", 6, 2, 64, 64, 0),
    ("fp32", 7, 1, 36, 20, 0),
]


@pytest.mark.parametrize(("format", "heads", "kv_heads", "k_dim", "v_dim", "window"), CHUNKED)
def test_results_do_not_depend_on_chunks_or_neighbours(rng, format, heads, kv_heads, k_dim, v_dim, window):
    layout = KVLayout(format, kv_heads, k_dim, v_dim, 300, window=window)
    case = AttentionCase(layout, heads, rng, batch=3)
    op = CpuOp("AsymKVAttention", **case.attributes)
    tokens = case.tokens(3, 230)
    together, alone = case.state(), case.state()
    together.ring[:] = alone.ring[:] = 0
    together.blocks[:] = alone.blocks[:] = 0
    whole = op(in_place=True, **case.inputs(tokens, together, [2, 0, 1], [230, 17, 230]))[0].copy()
    cuts = [0, 1, *sorted(rng.choice(np.arange(2, 230), 8, replace=False).tolist()), 230]
    print("cuts", cuts)
    for start, end in itertools.pairwise(cuts):
        part = {name: array[:1, start:end] for name, array in tokens.items()}
        case.lengths[:] = start
        out = op(in_place=True, **case.inputs(part, alone, [2], [end - start]))[0]
        np.testing.assert_array_equal(out[0], whole[0, start:end])
    np.testing.assert_array_equal(alone.blocks[-1], together.blocks[-1])
    np.testing.assert_array_equal(alone.ring[2], together.ring[2])


def test_decode_has_the_bits_of_prefill(rng):
    case = AttentionCase(KVLayout("mkv2", 3, 64, 64, 300), 9, rng)
    op, tokens = CpuOp("AsymKVAttention", **case.attributes), case.tokens(1, 300)
    state, single = case.state(), case.state()
    whole = op(in_place=True, **case.inputs(tokens, state, [0], [300]))[0].copy()
    for i in range(300):
        case.lengths[0] = i
        part = {name: array[:, i : i + 1] for name, array in tokens.items()}
        out = op(in_place=True, **case.inputs(part, single, [0], [1]))[0]
        np.testing.assert_array_equal(out[0, 0], whole[0, i])


def test_separate_buffers_give_the_same_as_in_place(rng):
    case = AttentionCase(KVLayout("mkv2", 2, 64, 64, 300), 4, rng)
    op, state = CpuOp("AsymKVAttention", **case.attributes), case.state()
    inputs = case.inputs(case.tokens(1, 170), state, [0], [170])
    before = state.copy()
    out, blocks, ring = op(**inputs)
    same_state(before, state)
    np.testing.assert_array_equal(out, op(in_place=True, **inputs)[0])
    same_state(KVState(case.layout, blocks, ring), state)


@pytest.mark.parametrize("name", ["k", "v"])
def test_nan_is_refused_before_anything_is_written(rng, name):
    case = AttentionCase(KVLayout("mkv2", 2, 64, 64, 300), 4, rng, batch=2)
    op, state = CpuOp("AsymKVAttention", **case.attributes), case.state()
    before, tokens = state.copy(), case.tokens(1, 5)
    case.lengths[1] = 7
    tokens[name][0, 3, 1, 9] = np.nan
    with pytest.raises(Exception, match=f"layer 3: NaN in {name} at slot 1, position 10"):
        op(in_place=True, **case.inputs(tokens, state, [1], [5]))
    same_state(before, state)


def test_nan_in_padding_is_ignored(rng):
    case = AttentionCase(KVLayout("mkv2", 2, 64, 64, 300), 4, rng)
    tokens = case.tokens(1, 5)
    tokens["k"][0, 3:] = np.nan
    op = CpuOp("AsymKVAttention", **case.attributes)
    assert np.isfinite(op(in_place=True, **case.inputs(tokens, case.state(), [0], [3]))[0]).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(slot_ids=np.array([5], np.int32)), "slot 5 does not exist"),
        (dict(lengths=np.array([299], np.int32)), "slot 0 is full"),
        (dict(lengths=np.array([-1], np.int32)), "slot 0 is full"),
        (dict(num_tokens=np.array([9], np.int32)), "num_tokens out of range"),
    ],
)
def test_inputs_out_of_range_are_errors(rng, change, message):
    case = AttentionCase(KVLayout("fp16", 2, 64, 64, 300), 4, rng)
    op, state = CpuOp("AsymKVAttention", **case.attributes), case.state()
    inputs = case.inputs(case.tokens(1, 3), state, [0], [3]) | change
    with pytest.raises(Exception, match=message):
        op(in_place=True, **inputs)


@pytest.mark.parametrize(
    ("change", "message"),
    [(dict(format="mkv3"), "mkv3"), (dict(promoted=6), "promoted"), (dict(layout="mma"), "layout")],
)
def test_bad_attributes_are_errors(rng, change, message):
    case = AttentionCase(KVLayout("mkv2", 2, 64, 64, 300), 4, rng)
    op = CpuOp("AsymKVAttention", **case.attributes)
    op.attributes |= change
    with pytest.raises(Exception, match=message):
        op(**case.inputs(case.tokens(1, 3), case.state(), [0], [3]))
