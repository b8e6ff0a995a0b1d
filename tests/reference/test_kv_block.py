from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moec.reference.kv_block import (
    block_section,
    dequantize_block,
    hadamard,
    pack2,
    quantize_block,
    quantize_keys,
    to_half,
    unpack2,
)
from moec.reference.kv_cache import KVLayout
from tests.helpers.rng import fresh_rng

LAYOUT = KVLayout("mkv2", 1, 64, 64, 1000)
ONES = np.ones(1, np.float32)


def rows_with_channel(values: np.ndarray, channel: int) -> np.ndarray:
    rows = np.zeros((64, 128), np.float16)
    rows[:, channel] = values
    return rows


def channel_of(rows: np.ndarray, channel: int) -> tuple[np.ndarray, float, int, np.ndarray]:
    """Codes, scale, zero point and values of a K channel after a round trip."""
    block = quantize_block(LAYOUT, rows, ONES)
    codes, scale, zero = quantize_keys(LAYOUT, rows[:, :64].astype(np.float32))
    x, _ = dequantize_block(LAYOUT, block, ONES)
    value = float(scale.view(ml_dtypes.float8_e4m3fn).astype(np.float32)[channel])
    return codes[:, channel], value, int(zero[channel]), x[:, channel]


@pytest.mark.parametrize("group", [1, 2, 4, 16, 32, 64])
def test_hadamard_is_the_sylvester_matrix_and_its_own_inverse(group):
    rng = fresh_rng()
    matrix = np.ones((1, 1))
    while len(matrix) < group:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = rng.standard_normal((3, 5, 2 * group)).astype(np.float32)
    want = (x.reshape(-1, group).astype(np.float64) @ matrix / np.sqrt(group)).reshape(x.shape)
    assert np.allclose(hadamard(x, group), want, atol=2e-6)
    assert np.allclose(hadamard(hadamard(x, group), group), x, atol=2e-6)


def test_pack_puts_channel_c_in_byte_c_over_4():
    codes = np.zeros(8, np.uint8)
    codes[[1, 3, 6]] = [3, 2, 1]
    assert pack2(codes).tolist() == [3 << 2 | 2 << 6, 1 << 4]
    random = fresh_rng().integers(0, 4, (3, 5, 64)).astype(np.uint8)
    assert np.array_equal(unpack2(pack2(random)), random)


def test_a_two_bit_channel_by_hand():
    # 0..6.3: half = .8*3.15 = 2.52, wanted scale 1.68 -> E4M3 1.75; middle 3.15; zp = rne(.63/1.75) = 0
    codes, scale, zero, x = channel_of(rows_with_channel(np.arange(64) / 10, 40), 40)
    assert (scale, zero) == (1.75, 0)
    assert codes.tolist() == [min(3, round(float(np.float16(i / 10)) / 1.75)) for i in range(64)]
    assert np.array_equal(x, 1.75 * codes)


def test_a_promoted_channel_by_hand():
    # -7.5..: half = 31.5/2 (no clip), scale 31.5/15 = 2.1 -> 2.25; zp = rne(-7.5/2.25) = -3
    codes, scale, zero, x = channel_of(rows_with_channel(np.arange(64) / 2 - 7.5, 3), 3)
    assert (scale, zero) == (2.25, -3)
    assert codes.max() == 14
    assert np.abs(x - (np.arange(64) / 2 - 7.5)).max() <= 2.25 / 2


def test_values_by_hand():
    rows = np.zeros((64, 128), np.float16)
    rows[4:6, 64:] = np.linspace(-1, 1, 64)
    block = quantize_block(LAYOUT, rows, ONES)
    # half = .8, scale 1.6/3 = .5333 -> .5625; low = 0 - 1.25 * .5625 = -.7031 -> -.6875, and
    # 0 - 1.75 * .5625 = -.9844 -> -1 in the odd token
    scale, zero = (block_section(LAYOUT, block, f"v_{name}")[4:6, 0] for name in ("scale", "zero"))
    assert scale.view(ml_dtypes.float8_e4m3fn).tolist() == [0.5625, 0.5625]
    assert zero.view(ml_dtypes.float8_e4m3fn).tolist() == [-0.6875, -1]
    _, y = dequantize_block(LAYOUT, block, ONES)
    assert sorted(set(y[4].tolist())) == [-0.6875, -0.125, 0.4375, 1]
    assert sorted(set(y[5].tolist())) == [-1, -0.4375, 0.125, 0.6875]
    # .7143 is 2.492 steps above -.6875; 2.492 * 1.0625 - .09375 = 2.554: code 3, though level 2 is nearer.
    # .6825 is 2.436 steps, 2.494: code 2.
    assert rows[4, 64 + 54] == np.float16(0.7143)
    assert y[4, 52:56].tolist() == [0.4375, 0.4375, 1, 1]


def test_values_keep_their_size_and_equal_ones_average_out():
    rows = fresh_rng().standard_normal((20, 64, 128)).astype(np.float16)
    _, y = dequantize_block(LAYOUT, quantize_block(LAYOUT, rows, ONES), ONES)
    v = rows[..., 64:].astype(np.float32)
    assert (v * y).sum() / (v * v).sum() == pytest.approx(1, abs=0.01)  # nearest levels: 0.97
    assert np.linalg.norm(y - v) < 0.4 * np.linalg.norm(v)
    rows[:] = rows[:, :1]
    _, y = dequantize_block(LAYOUT, quantize_block(LAYOUT, rows, ONES), ONES)
    off = y - rows[..., 64:].astype(np.float32)
    assert np.linalg.norm(off.mean(1)) < 0.6 * np.linalg.norm(off[:, 0])


@pytest.mark.parametrize("constant", [0.0, -0.0, 6e-8, 0.25, -3.0, 448.0, 1000.0, -65504.0])
def test_constant_values_are_within_half_a_step_of_e4m3(constant):
    rows = np.full((64, 128), constant, np.float16)
    block = quantize_block(LAYOUT, rows, ONES)
    assert (block_section(LAYOUT, block, "v_scale") == 1).all()  # 2^-9
    _, y = dequantize_block(LAYOUT, block, ONES)
    wanted = np.clip(rows[:, 64:].astype(np.float32), -448, 448)
    assert np.abs(y - wanted).max() <= np.abs(wanted).max() / 16 + 2.0**-9


def test_references_scale_values_exactly():
    rng = fresh_rng()
    rows = rng.standard_normal((64, 128)).astype(np.float16)
    scaled = rows.copy()
    scaled[:, 64:] *= np.float16(16)
    _, y = dequantize_block(LAYOUT, quantize_block(LAYOUT, rows, ONES), ONES)
    sixteen = np.full(1, 16, np.float32)
    block = quantize_block(LAYOUT, scaled, sixteen)
    assert np.array_equal(block, quantize_block(LAYOUT, rows, ONES))
    assert np.array_equal(dequantize_block(LAYOUT, block, sixteen)[1], y * 16)


@pytest.mark.parametrize("channel", [0, 63])
def test_constant_and_tiny_channels(channel):
    for constant in (0.0, 0.25, 6e-8, -6e-8):
        _, scale, zero, x = channel_of(rows_with_channel(np.full(64, constant), channel), channel)
        assert scale == 2.0**-9
        assert np.abs(x - np.clip(constant, zero * scale, None)).max() <= 2.0**-10


@pytest.mark.parametrize("channel", [0, 63])
def test_huge_channels_saturate(channel):
    values = np.where(np.arange(64) % 2, 65504.0, -65504.0)
    codes, scale, zero, _ = channel_of(rows_with_channel(values, channel), channel)
    assert scale == 448
    assert zero == (-128 if channel == 0 else -117)  # rne(-.8*65504/448); codes are clamped too
    assert set(codes.tolist()) == {0, 15 if channel == 0 else 3}


def test_infinities_are_clamped():
    assert to_half(np.array([np.inf, -np.inf, 1e30], np.float32)).tolist() == [65504, -65504, 65504]


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 2**32 - 1),
    st.sampled_from(["mkv2", "mkv2_lean", "k4v2"]),
    st.sampled_from([(64, 64), (80, 48), (16, 96)]),
    st.floats(-8, 8),
    st.integers(-4, 4),
)
def test_round_trip_error_is_bounded_by_clip_and_scale(seed, format, dims, offset, exponent):
    layout = KVLayout(format, 1, *dims, 1000)
    rng = np.random.default_rng(seed)
    rows = ((rng.standard_normal((64, sum(dims))) + offset) * 2.0**exponent).astype(np.float16)
    ref = np.ones(layout.num_v_groups, np.float32)
    block = quantize_block(layout, rows, ref)
    x, y = dequantize_block(layout, block, ref)
    k = rows[:, : dims[0]].astype(np.float32)
    scale = block_section(layout, block, "k_scale").view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    zero = block_section(layout, block, "k_zero").view(np.int8)
    span = k.max(0) - k.min(0)
    clipped = np.where(np.arange(dims[0]) < layout.promoted, 0.0, 0.1) * span  # cut off at either end
    free = np.abs(zero) < 127  # a clamped zero point moves the whole grid
    assert (np.abs(x - k) <= clipped + scale + 1e-5)[:, free].all()
    v = rows[:, dims[0] :].astype(np.float32).reshape(64, layout.num_v_groups, -1)
    v_scale = block_section(layout, block, "v_scale").view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    v_zero = block_section(layout, block, "v_zero").view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    bound = 0.1 * np.ptp(v, axis=-1) + v_scale + np.abs(v_zero) / 14
    assert (np.abs(y.reshape(v.shape) - v) <= bound[..., None] + 1e-5).all()


def test_single_signed_channels_use_all_levels():
    rng = fresh_rng()
    rows = (rng.random((64, 128)) + 3).astype(np.float16)
    codes, _, zero = quantize_keys(LAYOUT, rows[:, :64].astype(np.float32))
    assert (zero > 0).all()
    assert (codes.max(0)[16:] == 3).all()
    assert (codes.max(0)[:16] >= 13).all()


def test_batched_blocks_equal_single_ones():
    rng = fresh_rng()
    rows = rng.standard_normal((2, 3, 64, 128)).astype(np.float16)
    ref = 2.0 ** rng.integers(-2, 2, (2, 3, 1)).astype(np.float32)
    blocks = quantize_block(LAYOUT, rows, ref)
    for i in np.ndindex(2, 3):
        assert np.array_equal(blocks[i], quantize_block(LAYOUT, rows[i], ref[i]))
