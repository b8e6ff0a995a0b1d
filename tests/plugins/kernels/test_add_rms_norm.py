"""plugins/kernels/add_rms_norm.cu under the emulator against NumPy."""

import ctypes

import numpy as np
import pytest

from tests.helpers.kernels import DTYPES, norm_params, run_norm
from tests.helpers.kv_cases import assert_close, raw
from tests.helpers.simt import SCHEDULES


def make(rng, rows, columns, dtype):
    """x, residual and scale; x of another size in each row."""
    x, residual = rng.standard_normal((2, rows, columns))
    x *= 10.0 ** rng.integers(-2, 3, (rows, 1))
    scale = 1 + 0.2 * rng.standard_normal(columns)
    return [array.astype(DTYPES[dtype]) for array in (x, residual, scale)]


def reference(x, residual, scale, epsilon, offset=0.0):
    """(norm in float32, sum in the type of x); the norm is that of the rounded sum."""
    total = (x.astype(np.float32) + residual.astype(np.float32)).astype(x.dtype)
    wide = total.astype(np.float64)
    normed = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + epsilon)
    return (normed * (scale.astype(np.float64) + offset)).astype(np.float32), total


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
@pytest.mark.parametrize(("rows", "columns"), [(1, 1), (3, 40), (4, 128), (2, 576), (5, 2048), (1, 3000)])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_sum_and_norm(lib, rng, rows, columns, dtype, offset):
    inputs = make(rng, rows, columns, dtype)
    epsilon = float(rng.choice([1e-6, 1e-5, 0.5]))
    out, total = run_norm(lib, *inputs, epsilon, dtype, offset, schedule=int(rng.integers(3)))
    expected, expected_total = reference(*inputs, epsilon, offset)
    np.testing.assert_array_equal(raw(total), raw(expected_total))
    assert_close(out, expected)


def test_rows_of_zeros_and_large_sums(lib, rng):
    """Zeros stay zeros (epsilon), and squares of large fp16 values do not overflow."""
    x, residual, scale = make(rng, 3, 256, "fp16")
    x[0] = residual[0] = 0
    x[1] = residual[1] = 30000
    out, total = run_norm(lib, x, residual, scale, 1e-6, "fp16")
    assert not out[0].any()
    assert (total[1] == 60000).all()
    assert_close(out, reference(x, residual, scale, 1e-6)[0])


def test_neighbours_and_schedules_do_not_change_bits(lib, rng):
    x, residual, scale = make(rng, 6, 320, "fp16")
    outs = [run_norm(lib, x, residual, scale, 1e-6, "fp16", schedule=s) for s in SCHEDULES]
    for out in outs:
        np.testing.assert_array_equal(raw(out[0]), raw(outs[0][0]))
    for row in range(6):
        alone, _ = run_norm(lib, x[row : row + 1], residual[row : row + 1], scale, 1e-6, "fp16")
        np.testing.assert_array_equal(raw(alone[0]), raw(outs[0][0][row]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"rows": 0}, b"not positive"),
        ({"columns": 0}, b"not positive"),
        ({"rows": 1 << 31}, b"too many rows"),
        ({"epsilon": -1e-6}, b"epsilon"),
        ({"epsilon": float("nan")}, b"epsilon"),
        ({"dtype": 2}, b"fp16 or bf16"),
    ],
)
def test_check_names_what_is_wrong(lib, rng, change, message):
    params = norm_params(*make(rng, 2, 64, "fp16"), 1e-6, 0.0, "fp16")
    assert lib.check_norm(ctypes.byref(params)) is None
    for name, value in change.items():
        setattr(params, name, value)
    assert message in lib.check_norm(ctypes.byref(params))
