"""The yardsticks store what the papers say, and attention over them is that of decoding."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.kv_baselines import Kivi2, NaiveOutliers, attend, quantize_min_max
from tests.helpers.rng import fresh_rng


def decode(scheme, scale, query, key, value) -> np.ndarray:
    """Token by token in double precision."""
    out = np.zeros((query.shape[0], query.shape[1], value.shape[2]))
    group = query.shape[0] // key.shape[0]
    half_k, half_v = (x.astype(np.float16).astype(np.float64) for x in (key, value))
    for n in range(query.shape[1]):
        stored = scheme.store(0, key[:, : n + 1], value[:, : n + 1])
        seen_k, seen_v = scheme.visible(n)
        for head in range(query.shape[0]):
            kv = head // group
            k = np.concatenate([stored.key[kv, :seen_k], half_k[kv, seen_k : n + 1]])
            v = np.concatenate([stored.value[kv, :seen_v], half_v[kv, seen_v : n + 1]])
            logits = k @ query[head, n].astype(np.float64) * scale
            p = np.exp(logits - logits.max())
            out[head, n] = p @ v / p.sum()
    return out


@pytest.mark.parametrize("kind", [Kivi2, NaiveOutliers])
def test_attention_is_that_of_decoding(kind):
    rng = fresh_rng()
    query, key, value = (rng.standard_normal((h, 300, 64)).astype(np.float32) for h in (4, 2, 2))
    magnitudes = {0: (np.abs(key).mean(1), np.abs(value).mean(1))}
    scheme = kind(magnitudes) if kind is NaiveOutliers else kind()
    got, _ = attend(scheme, 0, 0.125, query, key, value)
    np.testing.assert_allclose(got, decode(scheme, 0.125, query, key, value), atol=2e-5)


def test_bits_count_everything_that_is_stored():
    rng = fresh_rng()
    key, value = (rng.standard_normal((2, 256, 64)).astype(np.float32) for _ in range(2))
    assert Kivi2().store(0, key, value).bits == 3.0
    scheme = NaiveOutliers({0: (np.abs(key).mean(1), np.abs(value).mean(1))})
    share = 4 / 64  # 5 % of 64, up to a multiple of 4
    per_channel = share * 16 + (1 - share) * (2 + 32 / 64)
    per_token = share * 16 + (1 - share) * 2 + 32 / 64
    assert scheme.store(0, key, value).bits == pytest.approx((per_channel + per_token) / 2)


def test_min_max_keeps_both_ends():
    x = np.array([[1.0, 2.0, 3.0, 4.0]], np.float32)
    stored, nbytes = quantize_min_max(x, 1)
    assert stored.tolist() == x.tolist()
    assert nbytes == 1 + 2 + 2
