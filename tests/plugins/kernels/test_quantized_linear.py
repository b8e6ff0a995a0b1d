"""plugins/kernels/quantized_linear.cu under the emulator against moec.reference.weights."""

import ctypes

import numpy as np
import pytest

from moec.reference.weights import dequantize_int4, dequantize_int8, quantize_int4, quantize_int8
from tests.helpers.kernels import DTYPES, linear_params, run_linear
from tests.helpers.kv_cases import assert_close, raw
from tests.helpers.simt import SCHEDULES

FORMATS = {4: (quantize_int4, dequantize_int4), 8: (quantize_int8, dequantize_int8)}


def make(rng, rows, columns, outputs, bits, dtype):
    quantize, dequantize = FORMATS[bits]
    codes, scales = quantize(rng.standard_normal((outputs, columns)).astype(np.float32))
    x = rng.standard_normal((rows, columns)).astype(DTYPES[dtype])
    weight = dequantize(codes, scales, columns).astype(np.float64)
    return x, codes, scales, (x.astype(np.float64) @ weight.T).astype(np.float32)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(
    ("rows", "columns", "outputs"), [(1, 64, 4), (4, 200, 33), (9, 576, 10), (17, 70, 3)]
)
def test_product(lib, rng, rows, columns, outputs, bits, dtype):
    x, codes, scales, expected = make(rng, rows, columns, outputs, bits, dtype)
    assert_close(run_linear(lib, x, codes, scales, bits, dtype, int(rng.integers(3))), expected)


@pytest.mark.parametrize("bits", [4, 8])
def test_neighbours_and_schedules_do_not_change_bits(lib, rng, bits):
    x, codes, scales, _ = make(rng, 11, 320, 20, bits, "fp16")
    outs = [run_linear(lib, x, codes, scales, bits, "fp16", schedule) for schedule in SCHEDULES]
    assert all(np.array_equal(raw(out), raw(outs[0])) for out in outs)
    for row in range(11):
        alone = run_linear(lib, x[row : row + 1], codes, scales, bits, "fp16")
        np.testing.assert_array_equal(raw(alone[0]), raw(outs[0][row]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 2}, b"bits"),
        ({"rows": 0}, b"not positive"),
        ({"rows": 1 << 40}, b"too many rows"),
        ({"group_size": 32}, b"group_size"),
        ({"code_bytes": 64}, b"do not fit"),
    ],
)
def test_check_names_what_is_wrong(lib, rng, change, message):
    x, codes, scales, _ = make(rng, 2, 200, 8, 4, "fp16")
    params = linear_params(x, codes, scales, 4, "fp16")
    assert lib.check_linear(ctypes.byref(params)) is None
    for name, value in change.items():
        setattr(params, name, value)
    assert message in lib.check_linear(ctypes.byref(params))
