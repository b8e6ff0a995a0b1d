from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moec.reference.kv_block import block_section, dequantize_block, quantize_block
from moec.reference.kv_int8 import dequantize_symmetric, quantize_symmetric
from moec.reference.kv_layout import KVLayout
from tests.helpers.rng import fresh_rng


def test_a_group_by_hand():
    x = np.array([0.0, 1.0, -3.0, 0.0127], np.float32)
    codes, amplitude = quantize_symmetric(x, 0)
    assert amplitude.view(ml_dtypes.float8_e4m3fn) == 3.0  # exact in E4M3: a step is 3/127
    assert codes.tolist() == [0, 42, -127, 1]
    np.testing.assert_allclose(
        dequantize_symmetric(codes, amplitude, 0), codes.astype(float) * 3 / 127, rtol=1e-6
    )


def test_zeros_and_values_above_the_range():
    codes, amplitude = quantize_symmetric(np.zeros((2, 5), np.float32), 1)
    assert not codes.any()
    assert amplitude.tolist() == [1, 1]
    codes, amplitude = quantize_symmetric(np.array([65504, -65504, 448], np.float32), 0)
    assert amplitude.view(ml_dtypes.float8_e4m3fn) == 448
    assert codes.tolist() == [127, -127, 127]


def test_sections_hold_channels_of_k_and_groups_of_v():
    rng = fresh_rng()
    layout = KVLayout("int8", 1, 48, 80, 1000)
    rows = rng.standard_normal((64, 128)).astype(np.float16)
    ref = (2.0 ** rng.integers(-2, 3, layout.num_v_groups)).astype(np.float32)
    block = quantize_block(layout, rows, ref)
    largest = np.abs(rows[:, :48].astype(np.float32)).max(0)
    amplitude = block_section(layout, block, "k_scale").view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert (largest <= amplitude).all()
    assert (amplitude <= largest * 1.125).all()
    assert (np.abs(block_section(layout, block, "k_codes").view(np.int8)).max(0) >= 112).all()
    grouped = rows[:, 48:].astype(np.float32).reshape(64, 5, 16) / ref[:, None]
    amplitude = block_section(layout, block, "v_scale").view(ml_dtypes.float8_e4m3fn).astype(np.float32)
    assert (np.abs(grouped).max(-1) <= amplitude).all()


@settings(deadline=None, max_examples=40)
@given(st.integers(0, 2**32 - 1), st.sampled_from([(64, 64), (80, 48), (16, 96)]), st.integers(-4, 4))
def test_round_trip_error_is_half_a_step(seed, dims, exponent):
    layout = KVLayout("int8", 1, *dims, 1000)
    rows = (np.random.default_rng(seed).standard_normal((64, sum(dims))) * 2.0**exponent).astype(np.float16)
    ref = np.ones(layout.num_v_groups, np.float32)
    x, y = dequantize_block(layout, quantize_block(layout, rows, ref), ref)
    k, v = rows[:, : dims[0]].astype(np.float32), rows[:, dims[0] :].astype(np.float32)
    bound = np.maximum(np.abs(k).max(0) * 1.125, 2.0**-9) / 254
    assert (np.abs(x - k) <= bound * 1.0001).all()
    v = v.reshape(64, layout.num_v_groups, -1)
    bound = np.maximum(np.abs(v).max(-1, keepdims=True) * 1.125, 2.0**-9) / 254
    assert (np.abs(y.reshape(v.shape) - v) <= bound * 1.0001).all()
