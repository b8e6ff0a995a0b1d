"""The 8-bit float E4M3 (OCP "FN": no infinities, 0x7F and 0xFF are NaN) by table, as MKV2 uses it."""

from __future__ import annotations

import numpy as np

F32 = np.float32
E4M3_MAX = F32(448.0)
E4M3_MIN_CODE, E4M3_MAX_CODE = 1, 126


def _decode(code: int) -> float:
    exponent, mantissa = (code >> 3) & 15, code & 7
    if (code & 127) == 127:
        return float("nan")
    magnitude = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -magnitude if code & 128 else magnitude


E4M3_VALUES = np.array([_decode(code) for code in range(256)], dtype=F32)
"""float32 value of each of the 256 codes (two NaNs)."""

E4M3_POSITIVE = E4M3_VALUES[E4M3_MIN_CODE : E4M3_MAX_CODE + 1].copy()
"""The 126 positive finite values, ascending: code = index + 1."""

_MAGNITUDES = E4M3_VALUES[: E4M3_MAX_CODE + 1]
# Exact in float32: neighbours differ in at most one bit of a 4-bit significand.
_MIDPOINTS = ((_MAGNITUDES[:-1] + _MAGNITUDES[1:]) / F32(2)).astype(F32)


def e4m3_decode(codes: np.ndarray) -> np.ndarray:
    """uint8 codes of any shape -> float32 values."""
    return E4M3_VALUES[np.asarray(codes, np.uint8)]


def e4m3_up(x: np.ndarray) -> np.ndarray:
    """Codes of the smallest positive finite E4M3 values that are >= x (float32, any shape, no NaN).

    Values up to 2^-9 (zero and negatives too) give code 1, values above 448 code 126: no scale is zero.
    """
    index = np.searchsorted(E4M3_POSITIVE, np.asarray(x, F32), side="left")
    return (np.minimum(index, E4M3_POSITIVE.size - 1) + E4M3_MIN_CODE).astype(np.uint8)


def e4m3_rne(x: np.ndarray) -> np.ndarray:
    """Codes of the nearest E4M3 values, ties to even, saturating at +-448 (float32, any shape, no NaN).

    Zero is always code 0x00, never 0x80: the sign of a zero depends on how max(-0, +0) is computed.
    """
    x = np.asarray(x, F32)
    magnitude = np.minimum(np.abs(x), E4M3_MAX)
    index = np.searchsorted(_MIDPOINTS, magnitude, side="left")
    tie = magnitude == _MIDPOINTS[np.minimum(index, _MIDPOINTS.size - 1)]
    code = index + (tie & (index % 2 == 1) & (index < _MIDPOINTS.size))
    return np.where((x < 0) & (code > 0), code + 128, code).astype(np.uint8)
