from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from moec.errors import MoecError
from moec.reference.attention import asym_kv_attention
from moec.reference.kv_cache import KVLayout
from tests.helpers.attention_case import AttentionCase
from tests.helpers.rng import fresh_rng

F8 = ml_dtypes.float8_e4m3fn


def relative_error(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.linalg.norm(got - want) / np.linalg.norm(want))


def torch_attention(q, k, v, scale, window=0, softcap=0.0, sinks=None):
    """Plain masked attention over a whole sequence, `[S,Hq*Dv]`, in float64."""
    q, k, v = (torch.from_numpy(x).double().transpose(0, 1) for x in (q, k, v))
    group = q.shape[0] // k.shape[0]
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    logits = q @ k.transpose(1, 2) * scale
    if softcap:
        logits = softcap * torch.tanh(logits / softcap)
    i = torch.arange(q.shape[1])
    seen = i[None] <= i[:, None]
    if window:
        seen &= i[None] > i[:, None] - window
    logits = logits.masked_fill(~seen, float("-inf"))
    if sinks is not None:
        column = torch.from_numpy(sinks).double()[:, None, None].expand(-1, q.shape[1], 1)
        logits = torch.cat([logits, column], -1)
    p = logits.softmax(-1)[..., : k.shape[1]]
    return (p @ v).transpose(0, 1).reshape(q.shape[1], -1).numpy()


@pytest.mark.parametrize(
    ("format", "window", "softcap", "sinks", "tolerance"),
    [
        ("fp32", 0, 0.0, 0, 1e-6),
        ("fp32", 30, 0.0, 1, 1e-6),
        ("fp32", 0, 2.0, 1, 1e-6),
        ("fp16", 0, 0.0, 1, 2e-3),
        ("mkv2", 30, 0.0, 0, 2e-3),
        ("mkv2", 0, 0.0, 0, 2e-3),
        ("mkv2_lean", 0, 0.0, 1, 2e-3),
    ],
)
def test_without_blocks_it_is_ordinary_attention(format, window, softcap, sinks, tolerance):
    layout = KVLayout(format, 2, 64, 32, 200, window=window)
    case = AttentionCase(fresh_rng(), layout, 6, softcap=softcap, has_sink_logits=sinks)
    q, k, v = case.tokens(1, 130)
    out = case.run(asym_kv_attention, q, k, v, slots=[1], counts=[130])
    logits = case.calibration["sink_logits"] if sinks else None
    want = torch_attention(q[0], k[0], v[0], case.attributes["scale"], window, softcap, logits)
    assert relative_error(out[0], want) <= tolerance


def decode_by_hand(layout: KVLayout, block: np.ndarray, v_ref: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Reads one block bit by bit, with nothing from the reference but the offsets of the byte table."""
    block, offset = block.view(np.uint8), layout.offsets
    dk, dv, p, groups = layout.k_dim, layout.v_dim, layout.promoted, layout.num_v_groups

    def code(section, row_channels, token, channel):
        byte = int(block[offset[section] + token * row_channels // 4 + channel // 4])
        return byte >> 2 * (channel % 4) & 3

    def e4m3(index):
        return float(block[index : index + 1].view(F8)[0])

    k, v = np.zeros((64, dk)), np.zeros((64, dv))
    for t in range(64):
        for c in range(dk):
            value = code("k_lo", dk, t, c) + (4 * code("k_hi", p, t, c) if c < p else 0)
            zero = int(block[offset["k_zero"] + c : offset["k_zero"] + c + 1].view(np.int8)[0])
            k[t, c] = e4m3(offset["k_scale"] + c) * (value + zero)
        for c in range(dv):
            g = t * groups + c // layout.v_group
            scale, low = e4m3(offset["v_scale"] + g), e4m3(offset["v_zero"] + g)
            v[t, c] = (code("v_codes", dv, t, c) * scale + low) * v_ref[c // layout.v_group]
    return k, v


@pytest.mark.parametrize(
    ("format", "dims"), [("mkv2", (64, 64)), ("mkv2_lean", (80, 96)), ("k4v2", (32, 48))]
)
def test_blocks_are_attended_as_their_bytes_say(format, dims):
    layout = KVLayout(format, 2, *dims, 400)
    case = AttentionCase(fresh_rng(), layout, 4)
    q, k, v = case.tokens(1, 300)
    case.run(asym_kv_attention, q[:, :299], k[:, :299], v[:, :299], slots=[0], counts=[299])
    out = case.run(asym_kv_attention, q[:, 299:], k[:, 299:], v[:, 299:], slots=[0], counts=[1])[0, 0]
    c = case.calibration
    for head in range(2):
        order, mean, ref = (c[name][head] for name in ("k_order", "k_mean", "k_ref"))
        x = (k[0, :, head][:, order] - mean) / ref
        hadamard = np.ones((1, 1))
        while len(hadamard) < layout.v_group:
            hadamard = np.block([[hadamard, hadamard], [hadamard, -hadamard]])
        rotation = np.kron(np.eye(layout.num_v_groups), hadamard / np.sqrt(layout.v_group))
        y = v[0, :, head] @ rotation
        for block in range(3):
            tokens = slice(16 + 64 * block, 80 + 64 * block)
            x[tokens], y[tokens] = decode_by_hand(layout, case.blocks[0, head, block], c["v_ref"][head])
        keys = np.zeros_like(x)
        keys[:, order] = x * ref + mean
        values = y @ rotation.T
        query = q[0, -1, 2 * head : 2 * head + 2]
        logits = query @ keys.T * case.attributes["scale"]
        p = np.exp(logits - logits.max(-1, keepdims=True))
        want = (p / p.sum(-1, keepdims=True)) @ values
        got = out.reshape(4, -1)[2 * head : 2 * head + 2]
        assert relative_error(got, want) <= 4e-3


@pytest.mark.parametrize(
    ("format", "window"), [("mkv2", 0), ("k4v2", 0), ("int8", 0), ("fp16", 0), ("fp32", 0), ("mkv2", 50)]
)
def test_chunking_changes_nothing(format, window):
    rng = fresh_rng()
    layout = KVLayout(format, 1, 32, 32, 400, window=window)
    whole = AttentionCase(rng, layout, 2, has_sink_logits=1)
    parts = whole.twin()
    q, k, v = whole.tokens(1, 280)
    want = whole.run(asym_kv_attention, q, k, v, slots=[2], counts=[280])
    outs, start = [], 0
    while start < 280:
        stop = min(280, start + int(rng.integers(1, 90)))
        piece = [x[:, start:stop] for x in (q, k, v)]
        outs.append(parts.run(asym_kv_attention, *piece, slots=[2], counts=[stop - start]))
        start = stop
    assert np.array_equal(np.concatenate(outs, 1), want)
    assert whole.state_bytes() == parts.state_bytes()


@pytest.mark.parametrize(("format", "window"), [("mkv2", 0), ("mkv2", 40), ("fp16", 0)])
def test_rollback_is_exact(format, window):
    layout = KVLayout(format, 1, 32, 32, 400, window=window, rollback_tokens=9)
    case = AttentionCase(fresh_rng(), layout, 2)
    q, k, v = case.tokens(1, 150)
    wrong = case.tokens(1, 9)
    straight = case.twin()
    case.run(asym_kv_attention, q[:, :140], k[:, :140], v[:, :140], slots=[0], counts=[140])
    case.run(asym_kv_attention, *wrong, slots=[0], counts=[9])  # flushes a block at 144
    case.lengths[0] -= 9
    out = case.run(asym_kv_attention, q[:, 140:], k[:, 140:], v[:, 140:], slots=[0], counts=[10])
    want = straight.run(asym_kv_attention, q, k, v, slots=[0], counts=[150])
    assert np.array_equal(out, want[:, 140:])
    assert np.array_equal(case.blocks, straight.blocks)


def test_rows_do_not_see_each_other_and_idle_rows_and_padding_are_zero():
    layout = KVLayout("mkv2", 2, 64, 64, 400)
    case = AttentionCase(fresh_rng(), layout, 4)
    alone = case.twin()
    q, k, v = case.tokens(3, 200)
    k[1], v[1] = np.nan, np.nan  # idle
    k[2, 150:], v[2, 150:] = np.nan, np.nan  # padding
    before = case.blocks[1].copy(), case.ring[1].copy()
    out = case.run(asym_kv_attention, q, k, v, slots=[2, 1, 0], counts=[200, 0, 150])
    single = alone.run(asym_kv_attention, q[:1], k[:1], v[:1], slots=[2], counts=[200])
    assert np.array_equal(out[0], single[0])
    assert not out[1].any()
    assert not out[2, 150:].any()
    assert np.array_equal(case.blocks[1], before[0])
    assert np.array_equal(case.ring[1], before[1])
    assert out[2, :150].any()


def test_a_used_slot_needs_no_clearing():
    layout = KVLayout("mkv2", 1, 64, 64, 400)
    fresh, used = (AttentionCase(np.random.default_rng(seed), layout, 2) for seed in (1, 1))
    used.blocks[:] = -1  # 0x7F/0xFF are NaN scales
    used.ring[:] = np.nan
    q, k, v = fresh.tokens(1, 170)
    want = fresh.run(asym_kv_attention, q, k, v, slots=[0], counts=[170])
    assert np.array_equal(used.run(asym_kv_attention, q, k, v, slots=[0], counts=[170]), want)


def test_centring_cancels_with_sink_logits_too():
    layout = KVLayout("mkv2", 1, 64, 64, 400)
    case = AttentionCase(fresh_rng(), layout, 2, has_sink_logits=1)
    plain = case.twin()
    plain.calibration["k_mean"] = np.zeros_like(plain.calibration["k_mean"])
    q, k, v = case.tokens(1, 100)
    a = case.run(asym_kv_attention, q, k, v, slots=[0], counts=[100])
    b = plain.run(asym_kv_attention, q, k, v, slots=[0], counts=[100])
    assert relative_error(a, b) <= 4e-3
    assert not np.array_equal(case.ring, plain.ring)


@pytest.mark.parametrize("name", ["k", "v"])
def test_nan_is_refused_with_its_place(name):
    layout = KVLayout("mkv2", 1, 64, 64, 400)
    case = AttentionCase(fresh_rng(), layout, 2, layer=7)
    tokens = dict(zip("qkv", case.tokens(1, 5), strict=True))
    tokens[name][0, 3, 0, 9] = np.nan
    case.lengths[2] = 40
    with pytest.raises(MoecError, match=r"NaN in .*layer 7, slot 2, position 43"):
        case.run(asym_kv_attention, **tokens, slots=[2], counts=[5])


def test_tensors_that_do_not_fit_are_refused():
    case = AttentionCase(fresh_rng(), KVLayout("mkv2", 1, 64, 64, 400), 2)
    case.blocks = case.blocks[..., :-128]
    with pytest.raises(MoecError, match="cache tensors"):
        case.run(asym_kv_attention, *case.tokens(1, 5), slots=[0], counts=[5])
