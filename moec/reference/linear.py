"""Dense layers on quantized weights with int8 activations, in NumPy: what moec::FusedLinear computes."""

from __future__ import annotations

import numpy as np

from moec.reference.weights import GROUP_SIZE, dequantize_int4, dequantize_int8, num_groups

F32 = np.float32


def round_int8(x: np.ndarray) -> np.ndarray:
    """Activations as int8 kernels see them: per 64 columns a scale max|x|/127, rounded to nearest even.

    Args:
        x: float32 `[..., K]`; a group with a value that is not finite becomes NaN.

    Returns:
        float32 `[..., K]`, code*scale.
    """
    x = np.asarray(x, F32)
    columns = x.shape[-1]
    groups = num_groups(columns)
    padding = [(0, 0)] * (x.ndim - 1) + [(0, groups * GROUP_SIZE - columns)]
    x = np.pad(x, padding).reshape(*x.shape[:-1], groups, GROUP_SIZE)
    with np.errstate(invalid="ignore"):
        scale = np.maximum(np.abs(x).max(-1, keepdims=True), F32(1e-35)) / F32(127)
        rounded = np.rint(x / scale) * scale
    rounded = np.where(np.isfinite(scale), rounded, F32(np.nan)).astype(F32)
    return rounded.reshape(*x.shape[:-2], groups * GROUP_SIZE)[..., :columns]


def linear(
    x: np.ndarray, codes: np.ndarray, scales: np.ndarray, bias: np.ndarray | None = None
) -> np.ndarray:
    """round_int8(x) W^T + bias, in float64.

    Args:
        x: float32 `[..., K]`.
        codes: uint8 `[N, ceil(K/64)*32]` (4 bits) or `[N, ceil(K/64)*64]` (8 bits), see `reference.weights`.
        scales: float16 `[N, ceil(K/64)]`.
        bias: float32 `[N]`.

    Returns:
        float64 `[..., N]`.
    """
    columns, groups = x.shape[-1], scales.shape[-1]
    dequantize = dequantize_int8 if codes.shape[-1] == groups * GROUP_SIZE else dequantize_int4
    weight = dequantize(codes, scales, columns).astype(np.float64)
    y = round_int8(x).astype(np.float64) @ weight.T
    return y if bias is None else y + bias
