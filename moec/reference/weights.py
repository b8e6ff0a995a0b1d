"""Quantized weights in NumPy: int4 and int8, symmetric, an fp16 scale per group of 64 input columns.

The bytes are those of ONNX Runtime's MatMulNBits (B and scales without zero points). Arithmetic is float32 in
a fixed order, so that the native packer gives the same bytes.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moec.errors import MoecError

F32 = np.float32
GROUP_SIZE = 64
INT4_ZERO, INT8_ZERO = 8, 128
INT4_SHRINK = tuple(F32(factor) for factor in (1.0, 0.95, 0.9, 0.85, 0.8))
"""Fractions of the extreme-value scale that the int4 search tries, in this order."""

_HALF_MAX = F32(65504)


def num_groups(columns: int) -> int:
    """Groups of 64 that cover `columns`."""
    return -(-columns // GROUP_SIZE)


def _grouped(weight: np.ndarray) -> np.ndarray:
    """`[N,K]` of any float type -> float32 `[N, groups, 64]`, zero-padded."""
    weight = np.asarray(weight).astype(F32, copy=False)
    if weight.ndim != 2 or not np.isfinite(weight).all():
        raise MoecError(f"cannot quantize a weight of shape {weight.shape}: it must be 2-D and finite")
    rows, columns = weight.shape
    padded = np.pad(weight, ((0, 0), (0, num_groups(columns) * GROUP_SIZE - columns)))
    return padded.reshape(rows, -1, GROUP_SIZE)


def _half_scale(scale: np.ndarray) -> np.ndarray:
    """fp16 scale; one that rounds to zero becomes 1, which maps its (tiny) weights to the zero code."""
    half = np.clip(scale, -_HALF_MAX, _HALF_MAX).astype(np.float16)
    return np.where(half == 0, np.float16(1), half)


def _tree_sum(x: np.ndarray) -> np.ndarray:
    """Float32 sum over the last axis (64 wide) by halves: the order is part of the format."""
    while x.shape[-1] > 1:
        half = x.shape[-1] // 2
        x = x[..., :half] + x[..., half:]
    return x[..., 0]


def _codes(groups: np.ndarray, scale: np.ndarray, zero: int, top: int) -> np.ndarray:
    return np.clip(np.rint(groups / scale.astype(F32)[..., None]) + F32(zero), F32(0), F32(top))


def quantize_int4(weight: np.ndarray, importance: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes to 4 bits: w ~ (code-8)*scale, scale by search over `INT4_SHRINK` for least squared error.

    Args:
        weight: `[N,K]`, any float type; row = output feature.
        importance: float32 `[K]`, what an input column's squared error counts, for instance the mean square
            of its activations; None counts all alike.

    Returns:
        codes uint8 `[N, ceil(K/64)*32]` (low nibble = even column, tail 8), scales float16 `[N, ceil(K/64)]`
        (may be negative: the extreme value of a group gets code 0).
    """
    groups = _grouped(weight)
    counts = _grouped(importance[None])[0] if importance is not None else F32(1)
    extreme = np.take_along_axis(groups, np.abs(groups).argmax(axis=-1)[..., None], axis=-1)[..., 0]
    best_error = np.full(extreme.shape, np.inf, F32)
    best_scale, best_codes = np.ones(extreme.shape, np.float16), np.zeros(groups.shape, np.uint8)
    for factor in INT4_SHRINK:
        scale = _half_scale((extreme * factor) / F32(-8))
        codes = _codes(groups, scale, INT4_ZERO, 15)
        difference = groups - (codes - F32(INT4_ZERO)) * scale.astype(F32)[..., None]
        error = _tree_sum(difference * difference * counts)
        better = error < best_error
        best_error = np.where(better, error, best_error)
        best_scale = np.where(better, scale, best_scale)
        best_codes[better] = codes[better].astype(np.uint8)
    return pack_nibbles(best_codes.reshape(len(groups), -1)), best_scale


def quantize_int8(weight: np.ndarray, importance: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """Quantizes to 8 bits: w ~ (code-128)*scale, scale = fp16(max|w|/127).

    Args:
        weight: `[N,K]`, any float type.
        importance: Not used: at 8 bits there is nothing to trade.

    Returns:
        codes uint8 `[N, ceil(K/64)*64]` (tail 128), scales float16 `[N, ceil(K/64)]`.
    """
    groups = _grouped(weight)
    scale = _half_scale(np.abs(groups).max(axis=-1) / F32(127))
    return _codes(groups, scale, INT8_ZERO, 255).astype(np.uint8).reshape(len(groups), -1), scale


def _dequantize(codes: np.ndarray, scales: np.ndarray, zero: int, columns: int) -> np.ndarray:
    groups = codes.reshape(*scales.shape, GROUP_SIZE).astype(F32) - F32(zero)
    weight = groups * np.asarray(scales).astype(F32)[..., None]
    return weight.reshape(*scales.shape[:-1], -1)[..., :columns]


def dequantize_int4(codes: np.ndarray, scales: np.ndarray, columns: int) -> np.ndarray:
    """codes uint8 `[..., N, G*32]`, scales float16 `[..., N, G]` -> float32 `[..., N, columns]`."""
    return _dequantize(unpack_nibbles(codes), scales, INT4_ZERO, columns)


def dequantize_int8(codes: np.ndarray, scales: np.ndarray, columns: int) -> np.ndarray:
    """codes uint8 `[..., N, G*64]`, scales float16 `[..., N, G]` -> float32 `[..., N, columns]`."""
    return _dequantize(codes, scales, INT8_ZERO, columns)


def pack_nibbles(codes: np.ndarray) -> np.ndarray:
    """4-bit codes uint8 `[..., n]` -> bytes `[..., n/2]`, low nibble = even column."""
    return codes[..., 0::2] | (codes[..., 1::2] << 4)


def unpack_nibbles(packed: np.ndarray) -> np.ndarray:
    """The inverse of `pack_nibbles`."""
    pairs = np.stack([packed & 15, packed >> 4], axis=-1)
    return pairs.reshape(*packed.shape[:-1], -1)


QUANTIZERS: dict[str, Callable] = {"int4": quantize_int4, "int8": quantize_int8}
