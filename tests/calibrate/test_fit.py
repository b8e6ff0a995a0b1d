"""The fitted tensors: order, powers of two in E4M3's precise range, and a smaller error than without."""

from __future__ import annotations

import numpy as np
import pytest

from moec.calibrate.fit import channel_order, fit_layer, power_of_two
from moec.calibrate.statistics import LayerStatistics
from moec.reference.kv_block import block_section, dequantize_block, e4m3_decode, quantize_block
from moec.reference.kv_cache import Calibration, neutral_calibration, permute, prepare_rows
from moec.reference.kv_layout import KVLayout


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return np.random.default_rng(seed)


LAYOUT = KVLayout("mkv2", 2, 64, 64, 1024)


def sample(rng, spread, bias, length=400):
    """Keys with a different spread and bias per channel, values with rare large channels."""
    q = rng.normal(size=(4, length, 64)).astype(np.float32)
    k = (rng.normal(size=(2, length, 64)) * spread[:, None] + bias[:, None]).astype(np.float32)
    v = (rng.normal(size=(2, length, 64)) * np.exp(rng.normal(size=(2, 1, 64)))).astype(np.float32)
    return q, k, v


def fitted(rng, spread, bias, **options) -> tuple[Calibration, LayerStatistics]:
    statistics = LayerStatistics(LAYOUT)
    for _ in range(3):
        statistics.add(*sample(rng, spread, bias))
    return fit_layer(statistics, **options), statistics


def test_order_promotes_the_largest_and_sorts_both_parts():
    layout = KVLayout("mkv2", 1, 16, 16, 1024)
    score = np.array([[0, 9, 1, 1, 8, 0, 0, 0, 7, 0, 0, 0, 0, 0, 0, 1.0]])
    assert channel_order(layout, score).tolist() == [[1, 2, 4, 8, 0, 3, 5, 6, 7, 9, 10, 11, 12, 13, 14, 15]]


def test_large_channels_are_promoted_and_centred(rng):
    spread, bias = np.ones((2, 64)), rng.normal(size=(2, 64)) * 20
    loud = [rng.choice(64, 16, replace=False) for _ in range(2)]
    for head in range(2):
        spread[head, loud[head]] = 8
    calibration, _ = fitted(rng, spread, bias)
    for head in range(2):
        assert calibration.k_order[head, :16].tolist() == sorted(loud[head])
        assert sorted(calibration.k_order[head]) == list(range(64))
    np.testing.assert_allclose(calibration.k_mean, permute(bias, calibration.k_order), atol=2)


def test_no_centring_under_a_soft_cap(rng):
    calibration, _ = fitted(rng, np.ones((2, 64)), np.full((2, 64), 5.0), centre=False)
    assert not calibration.k_mean.any()


def test_references_are_powers_of_two_near_the_typical_scale(rng):
    spread = np.exp(rng.normal(size=(2, 64)) * 4)
    calibration, _ = fitted(rng, spread, np.zeros((2, 64)))
    for reference in (calibration.k_ref, calibration.v_ref):
        assert reference.dtype == np.float32
        assert np.all(np.frexp(reference)[0] == 0.5)
    _, k, v = sample(rng, spread, np.zeros((2, 64)), 64)
    rows = prepare_rows(LAYOUT, k.transpose(1, 0, 2), v.transpose(1, 0, 2), calibration).transpose(1, 0, 2)
    block = quantize_block(LAYOUT, rows, calibration.v_ref)
    for name in ("k_scale", "v_scale"):
        scale = e4m3_decode(block_section(LAYOUT, block, name))
        assert scale.min() > 2**-3
        assert scale.max() < 2**3


def test_the_largest_block_keeps_headroom():
    assert power_of_two(np.array([1.0, 1.0, 0.0, 3.0]), np.array([1.0, 5000.0, 0.0, 4.0])).tolist() == [
        1,
        64,
        1,
        4,
    ]


def test_the_error_is_smaller_than_without(rng):
    """Big channels overflow raw E4M3, tiny ones vanish: the case that made the reference necessary."""
    spread = np.exp(rng.permuted(np.tile(np.linspace(-8, 8, 64), (2, 1)), axis=1))
    spread[:, :4] = 4000
    bias = spread * rng.choice([-1, 1], (2, 64)) * rng.uniform(15, 60, (2, 64))
    calibration, _ = fitted(rng, spread, bias)
    _, k, v = sample(rng, spread, bias, 64)
    errors = [relative_key_error(k, v, c) for c in (calibration, neutral_calibration(LAYOUT))]
    assert errors[0] < 0.35
    assert errors[0] < errors[1] / 4


def relative_key_error(k, v, calibration) -> float:
    rows = prepare_rows(LAYOUT, k.transpose(1, 0, 2), v.transpose(1, 0, 2), calibration).transpose(1, 0, 2)
    x, _ = dequantize_block(LAYOUT, quantize_block(LAYOUT, rows, calibration.v_ref), calibration.v_ref)
    back = x * calibration.k_ref[:, None] + calibration.k_mean[:, None]
    want = np.take_along_axis(k, calibration.k_order[:, None].astype(np.int64).repeat(64, 1), -1)
    noise = np.square(back - want).mean(1)
    return float(np.sqrt(noise / want.var(1)).mean())


def test_nothing_seen_is_neutral():
    got, want = fit_layer(LayerStatistics(LAYOUT)), neutral_calibration(LAYOUT)
    for name in ("k_mean", "k_ref", "k_order", "v_ref"):
        np.testing.assert_array_equal(getattr(got, name), getattr(want, name))
