"""Arithmetic of the cache format int8: symmetric, one E4M3 amplitude per group. Every step is float32.

K: a group is a channel over the 64 tokens of a block. V: a token's rotated values in one V group.
"""

from __future__ import annotations

import numpy as np

from moec.reference.e4m3 import e4m3_decode, e4m3_up

F32 = np.float32
TOP_CODE = F32(127)


def quantize_symmetric(x: np.ndarray, axis: int) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes groups along `axis`.

    Args:
        x: float32, relative to the reference.
        axis: The axis that a group runs along.

    Returns:
        codes int8 of x's shape, -127..127, and amplitude codes (E4M3) uint8 without that axis: the smallest
        E4M3 value that is >= the largest |x|. A step is amplitude / 127.
    """
    amplitude_codes = e4m3_up(np.abs(x).max(axis=axis))
    step = e4m3_decode(amplitude_codes) / TOP_CODE
    codes = np.clip(np.rint(x / np.expand_dims(step, axis)), -TOP_CODE, TOP_CODE)
    return codes.astype(np.int8), amplitude_codes


def dequantize_symmetric(codes: np.ndarray, amplitude_codes: np.ndarray, axis: int) -> np.ndarray:
    """float32 values of int8 codes: code * (amplitude / 127)."""
    step = e4m3_decode(amplitude_codes) / TOP_CODE
    return codes.astype(F32) * np.expand_dims(step, axis)
