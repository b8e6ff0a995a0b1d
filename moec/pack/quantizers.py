"""Quantizers for packing: the NumPy reference, or a native one that gives the same bytes faster."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moec.reference.weights import QUANTIZERS

Quantizer = Callable[[np.ndarray], tuple[np.ndarray, np.ndarray]]


def quantizer(transform: str) -> Quantizer:
    """`[N,K]` of any float type -> (codes uint8, scales float16), for int4 or int8."""
    return QUANTIZERS[transform]
