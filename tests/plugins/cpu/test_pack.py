"""Native weight quantizers: the bytes of the NumPy reference."""

import ml_dtypes
import numpy as np
import pytest

from moec import native
from moec.errors import MoecError
from moec.reference import weights

PAIRS = [
    (native.quantize_int4, weights.quantize_int4),
    (native.quantize_int8, weights.quantize_int8),
]


@pytest.mark.parametrize(("fast", "truth"), PAIRS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 64), (33, 200), (4, 63), (64, 576)])
@pytest.mark.parametrize("scale", [1e-42, 1e-9, 1e-4, 1.0, 3e4, 1e30])
def test_same_bytes(rng, fast, truth, shape, scale):
    weight = (rng.standard_normal(shape) * scale).astype(np.float32)
    weight[0, 0] = 0
    for got, expected in zip(fast(weight), truth(weight), strict=True):
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize(("fast", "truth"), PAIRS)
@pytest.mark.parametrize("shape", [(1, 1), (7, 64), (33, 200), (4, 63)])
def test_bf16_is_read_as_it_is(rng, fast, truth, shape):
    weight = (rng.standard_normal(shape) * np.exp2(rng.integers(-140, 100, shape))).astype(ml_dtypes.bfloat16)
    for got, expected in zip(fast(weight), truth(weight), strict=True):
        np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize(("fast", "truth"), PAIRS)
def test_special_groups(rng, fast, truth):
    weight = rng.standard_normal((8, 128)).astype(np.float32)
    weight[0] = 0
    weight[1] = -0.0
    weight[2] = 1.5
    weight[3] = -1.5
    weight[4, ::2] = -weight[4, 1::2]  # ties of the largest magnitude
    weight[5] = np.abs(weight[5])
    weight[6, 3] = 1e4
    weight[7] = np.round(weight[7] * 4) / 8
    for got, expected in zip(fast(weight), truth(weight), strict=True):
        np.testing.assert_array_equal(got.view(np.uint8), expected.view(np.uint8))


@pytest.mark.parametrize(("fast", "truth"), PAIRS)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize("bad", [np.nan, -np.inf])
def test_not_finite_is_refused(rng, fast, truth, dtype, bad):
    weight = rng.standard_normal((3, 130)).astype(dtype)
    weight[tuple(rng.integers(0, (3, 130)))] = bad
    with pytest.raises(MoecError, match="finite"):
        fast(weight)
