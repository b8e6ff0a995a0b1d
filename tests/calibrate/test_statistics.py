"""Statistics against a plain loop over tokens."""

from __future__ import annotations

import numpy as np
import pytest

from moec.calibrate.statistics import LayerStatistics
from moec.reference.kv_layout import KVLayout


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return np.random.default_rng(seed)


def test_sums_match_a_loop(rng):
    layout = KVLayout("mkv2", 2, 16, 32, 1024)
    statistics = LayerStatistics(layout)
    total_k, total_q, total_r = np.zeros((2, 16)), np.zeros((2, 16)), np.zeros((2, 16))
    total_v, tokens, blocks = np.zeros((2, 1)), 0, 0
    rotation = np.array([[(-1.0) ** (i & j).bit_count() for j in range(32)] for i in range(32)]) / np.sqrt(32)
    for length in (16 + 64 * 2 + 5, 16 + 64, 90 - 20):
        q, k, v = (rng.normal(size=(h, length, d)).astype(np.float32) for h, d in ((4, 16), (2, 16), (2, 32)))
        statistics.add(q, k, v)
        for block in range((length - 16) // 64):
            span = range(16 + 64 * block, 80 + 64 * block)
            blocks, tokens = blocks + 1, tokens + 64
            for h in range(2):
                total_k[h] += sum(k[h, t] for t in span)
                total_q[h] += sum((q[2 * h, t] ** 2 + q[2 * h + 1, t] ** 2) / 2 for t in span)
                total_r[h] += (k[h, span].max(0) - k[h, span].min(0)) ** 2
                for t in span:
                    y = rotation @ v[h, t]
                    total_v[h, 0] += (y.max() - y.min()) ** 2
    assert (statistics.tokens, statistics.blocks) == (tokens, blocks) == (192, 3)
    np.testing.assert_allclose(statistics.k_sum, total_k, rtol=1e-4, atol=1e-3)
    np.testing.assert_allclose(statistics.q_square, total_q, rtol=1e-4)
    np.testing.assert_allclose(statistics.k_range_square, total_r, rtol=1e-5)
    np.testing.assert_allclose(statistics.v_range_square, total_v, rtol=1e-4)


def test_sinks_and_short_windows_do_not_count(rng):
    layout = KVLayout("mkv2", 1, 16, 16, 1024)
    statistics = LayerStatistics(layout)
    q = rng.normal(size=(1, 79, 16)).astype(np.float32)
    statistics.add(q, q, q)
    assert statistics.blocks == 0
    k = np.ones((1, 80, 16), np.float32)
    k[:, :16] = 1e6
    statistics.add(k, k, k)
    np.testing.assert_array_equal(statistics.k_sum / statistics.tokens, 1)
    assert statistics.k_range_max.max() == 0


def test_nan_is_noticed():
    statistics = LayerStatistics(KVLayout("mkv2", 1, 16, 16, 1024))
    k = np.zeros((1, 80, 16), np.float32)
    assert statistics.is_finite()
    k[0, 40, 3] = np.nan
    statistics.add(k, k, k)
    assert not statistics.is_finite()
