"""moec.AsymmetricKVCacheQuantizer against the cache itself, and the mistakes of its users."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import moec
from moec.errors import MoecError
from moec.reference.attention import asym_kv_attention
from moec.reference.kv_cache import KVLayout, KVState
from tests.helpers.rng import fresh_rng


def tensors(rng: np.random.Generator, tokens: int = 400, dims: tuple[int, int] = (64, 64)):
    """q, k, v `[2,H,S,D]` with loud and biased channels in K."""
    spread = np.exp(rng.standard_normal((2, 1, dims[0])))
    q = rng.standard_normal((2, 4, tokens, dims[0]))
    k = rng.standard_normal((2, 2, tokens, dims[0])) * spread + 3 * rng.standard_normal((2, 1, dims[0]))
    v = rng.standard_normal((2, 2, tokens, dims[1]))
    return tuple(x.astype(np.float32) for x in (q, k, v))


def relative(a: np.ndarray, b: np.ndarray) -> float:
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


@pytest.mark.parametrize(
    ("format", "bits", "k_error", "v_error"),
    [
        ("mkv2", 2.5, 0.15, 0.4),
        ("mkv2-lean", 2.375, 0.2, 0.4),
        ("k4v2", 3.25, 0.1, 0.4),
        ("int8", 8.125, 0.01, 0.02),
    ],
)
def test_round_trip(format, bits, k_error, v_error):
    q, k, v = tensors(fresh_rng())
    quantizer = moec.AsymmetricKVCacheQuantizer(format).calibrate(k, v, q)
    packed = quantizer.compress(k, v)
    assert packed.tokens == 400
    assert packed.blocks.shape[2] == (400 - 16 - 64) // 64
    k_seen, v_seen = quantizer.decompress(packed)
    assert relative(k_seen, k) < k_error
    assert relative(v_seen, v) < v_error
    fp16 = np.r_[0:16, 336:400]
    for seen, given in ((k_seen, k), (v_seen, v)):
        assert np.abs(seen - given)[:, :, fp16].max() < np.abs(given).max() / 1000
    assert quantizer.bits_per_element() == bits
    elements = k.size + v.size
    assert packed.bits_per_element == 8 * packed.nbytes / elements


def test_it_is_the_caches_own_state():
    q, k, v = tensors(fresh_rng(), 300)
    quantizer = moec.AsymmetricKVCacheQuantizer().calibrate(k, v, q)
    packed = quantizer.compress(k, v)
    layout = KVLayout("mkv2", 2, 64, 64, 300)
    state = KVState.empty(layout, 2)
    c = quantizer.calibration
    by_token = [x.swapaxes(1, 2) for x in (q, k, v)]
    _, blocks, ring = asym_kv_attention(
        *by_token, state.blocks, state.ring, np.arange(2), np.zeros(2, np.int32), np.full(2, 300),
        c.k_mean, c.k_ref, c.k_order, c.v_ref, np.zeros(4, np.float32), scale=0.125, promoted=16,
    )  # fmt: skip
    np.testing.assert_array_equal(packed.blocks, blocks.view(np.uint8))
    np.testing.assert_array_equal(packed.sinks, ring[:, :, :16])
    rows = layout.ring_row(np.arange(300 - packed.recent.shape[2], 300))
    np.testing.assert_array_equal(packed.recent, ring[:, :, rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_torch_tensors_come_back_as_they_were(dtype):
    q, k, v = (torch.from_numpy(x).to(dtype) for x in tensors(fresh_rng()))
    quantizer = moec.AsymmetricKVCacheQuantizer().calibrate(k, v, q)
    seen = quantizer.decompress(quantizer.compress(k, v))
    assert all(x.dtype == dtype and x.shape == k.shape for x in seen)
    arrays = [x.float().numpy() for x in (k, v)]
    plain = quantizer.decompress(quantizer.compress(*arrays))
    for a, b in zip(seen, plain, strict=True):
        torch.testing.assert_close(a, torch.from_numpy(b).to(dtype))


def test_outlier_fraction_buys_accuracy():
    q, k, v = tensors(fresh_rng())
    errors, bits = [], []
    for fraction in (0, 0.125, 0.25, 0.5, 1.0):
        quantizer = moec.AsymmetricKVCacheQuantizer("mkv2", fraction).calibrate(k, v, q)
        errors.append(relative(quantizer.decompress(quantizer.compress(k, v))[0], k))
        bits.append(quantizer.bits_per_element())
    assert errors == sorted(errors, reverse=True)
    assert bits == [2.25, 2.375, 2.5, 2.75, 3.25]


def test_queries_decide_which_channels_are_outliers():
    rng = fresh_rng()
    q, k, v = tensors(rng)
    loud = rng.choice(64, 16, replace=False)
    q[..., loud] *= 1e5  # keys' channels differ by up to a thousand
    order = moec.AsymmetricKVCacheQuantizer().calibrate(k, v, q).calibration.k_order
    assert order[:, :16].tolist() == [sorted(loud)] * 2


def test_bits_of_a_whole_allocation():
    q, k, v = tensors(fresh_rng())
    quantizer = moec.AsymmetricKVCacheQuantizer().calibrate(k, v, q)
    assert quantizer.bits_per_element(4096) == KVLayout("mkv2", 2, 64, 64, 4096).bits_per_element_allocated


@pytest.mark.parametrize(
    ("mistake", "message"),
    [
        (lambda: moec.AsymmetricKVCacheQuantizer("fp16"), "'fp16' is unknown"),
        (lambda: moec.AsymmetricKVCacheQuantizer(outlier_fraction=2), "from 0 to 1"),
        (lambda: moec.AsymmetricKVCacheQuantizer("int8", 0.5), "int8 has no outlier channels"),
        (lambda: moec.AsymmetricKVCacheQuantizer().compress(*[np.ones((1, 2, 9, 8))] * 2), "not calibrated"),
        (lambda: moec.AsymmetricKVCacheQuantizer().calibrate(*[np.ones((1, 2, 9, 64))] * 2), "too few"),
        (lambda: moec.AsymmetricKVCacheQuantizer().calibrate(*[np.ones((2, 200, 64))] * 2), "3 dimensions"),
        (lambda: moec.AsymmetricKVCacheQuantizer().calibrate(*[np.full((1, 1, 99, 64), np.nan)] * 2), "NaN"),
    ],
)  # fmt: skip
def test_mistakes(mistake, message):
    with pytest.raises(MoecError, match=message):
        mistake()
