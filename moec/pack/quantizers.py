"""Quantizers for packing: native code where it is there, else the NumPy reference. The bytes are the same."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np

from moec import native
from moec.reference.weights import QUANTIZERS

Quantizer = Callable[..., tuple[np.ndarray, np.ndarray]]  # (weight, importance=None) -> codes, scales
_NATIVE = {"int4": native.quantize_int4, "int8": native.quantize_int8}


@functools.cache
def quantizer(transform: str) -> Quantizer:
    """(weight `[N,K]` of any float type, importance f32 `[K]` or None) -> (codes uint8, scales float16).

    The native quantizer is taken only if it is built and reproduces the reference on a sample, bit for bit.
    """
    reference = QUANTIZERS[transform]
    found = native.find_library("moec_cpu") is not None and _agrees(_NATIVE[transform], reference)
    return _NATIVE[transform] if found else reference


def _agrees(quantize: Quantizer, reference: Quantizer) -> bool:
    rng = np.random.default_rng(0)
    sample = rng.normal(size=(8, 200)).astype(np.float32) * np.exp2(rng.integers(-20, 4, (8, 1)))
    sample[0, :64] = 0
    try:
        pairs = [
            (quantize(sample, counts), reference(sample, counts))
            for counts in (None, rng.random(200, dtype=np.float32))
        ]
        return all(a.tobytes() == b.tobytes() for got, want in pairs for a, b in zip(got, want, strict=True))
    except (AttributeError, OSError):  # an older library, or one of another machine
        return False
