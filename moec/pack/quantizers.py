"""Quantizers for packing: native code where it is there, else the NumPy reference. The bytes are the same."""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Callable

import numpy as np

from moec.errors import MoecError
from moec.reference.weights import QUANTIZERS, num_groups

Quantizer = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]
_CODE_BYTES = {"int4": 32, "int8": 64}


@functools.cache
def quantizer(transform: str) -> Quantizer:
    """`[N,K]` of any float type -> (codes uint8, scales float16), for int4 or int8.

    The native quantizer is taken only if it reproduces the reference on a sample, bit for bit.
    """
    reference = QUANTIZERS[transform]
    native = native_quantizer(transform)
    if native is None or not _agrees(native, reference):
        return reference
    return native


def native_quantizer(transform: str) -> Quantizer | None:
    """The quantizer of libmoec_cpu; None where the library is missing or older."""
    from moec import native

    try:
        function = getattr(ctypes.CDLL(str(native.cpu_library())), f"moec_quantize_{transform}")
    except (MoecError, OSError, AttributeError):
        return None
    function.restype = None
    function.argtypes = [ctypes.c_void_p, ctypes.c_int64, ctypes.c_int64, ctypes.c_void_p, ctypes.c_void_p]
    return functools.partial(_call, function, _CODE_BYTES[transform])


def _call(function: Callable, code_bytes: int, weight: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    weight = np.ascontiguousarray(weight, np.float32)
    if weight.ndim != 2 or not np.isfinite(weight).all():
        raise MoecError(f"cannot quantize a weight of shape {weight.shape}: it must be 2-D and finite")
    rows, columns = weight.shape
    groups = num_groups(columns)
    codes, scales = np.empty((rows, groups * code_bytes), np.uint8), np.empty((rows, groups), np.float16)
    function(weight.ctypes.data, rows, columns, codes.ctypes.data, scales.ctypes.data)
    return codes, scales


def _agrees(native: Quantizer, reference: Quantizer) -> bool:
    rng = np.random.default_rng(0)
    sample = rng.normal(size=(8, 200)).astype(np.float32) * np.exp2(rng.integers(-20, 4, (8, 1)))
    sample[0, :64] = 0
    pairs = zip(native(sample), reference(sample), strict=True)
    return all(a.tobytes() == b.tobytes() for a, b in pairs)
