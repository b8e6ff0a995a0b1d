"""Arithmetic of one block: rotate, pack, quantize, dequantize. Every step is float32, as in kernels."""

from __future__ import annotations

import numpy as np

from moec.reference.e4m3 import E4M3_MAX, e4m3_decode, e4m3_rne, e4m3_up
from moec.reference.kv_int8 import dequantize_symmetric, quantize_symmetric
from moec.reference.kv_layout import KVLayout

F32 = np.float32
Triple = tuple[np.ndarray, np.ndarray, np.ndarray]
HALF_MAX = F32(65504.0)
CLIP_2BIT, CLIP_4BIT = F32(0.8), F32(1.0)
LEVELS_2BIT, LEVELS_4BIT = F32(3.0), F32(15.0)
VALUE_OFFSETS = np.tile(np.array([1.25, 1.75], F32), 32)
"""Steps from a V group's lowest level to the middle of its range, by token: the grid moves a quarter of a
step up and down in turn, so that errors of similar tokens, which attention looks at together, cancel."""
VALUE_STRETCH, VALUE_SHIFT = F32(1.0625), F32(0.09375)
"""V codes are chosen on a grid 1/17 finer than the stored one, about its middle (1.5 steps up,
hence the shift): nearest levels would shrink values by 3 %, in all tokens alike."""
_SHIFTS = np.array([0, 2, 4, 6], np.uint8)


def hadamard(x: np.ndarray, group: int) -> np.ndarray:
    """Orthonormal Walsh-Hadamard transform (Sylvester order) of each `group` of the last axis; self-inverse.

    Args:
        x: float32 `[..., n*group]`; group is a power of two.
        group: Size of the transform.

    Returns:
        float32 of the same shape. The butterfly runs over strides 1, 2, 4, ... as (a+b, a-b), then one
        multiplication by float32(1/sqrt(group)): the rounding is part of the format.
    """
    y = np.asarray(x, F32).reshape(-1, group).copy()
    stride = 1
    while stride < group:
        pairs = y.reshape(-1, group // (2 * stride), 2, stride)
        a, b = pairs[:, :, 0].copy(), pairs[:, :, 1].copy()
        pairs[:, :, 0], pairs[:, :, 1] = a + b, a - b
        stride *= 2
    return (y * F32(1.0 / np.sqrt(group))).reshape(np.shape(x))


def to_half(x: np.ndarray) -> np.ndarray:
    """Clamps float32 to +-65504 and rounds to float16 (nearest even)."""
    return np.clip(np.asarray(x, F32), -HALF_MAX, HALF_MAX).astype(np.float16)


def pack2(codes: np.ndarray) -> np.ndarray:
    """2-bit codes uint8 `[..., n]` -> bytes uint8 `[..., n/4]`: channel c in byte c/4 at bits 2*(c%4)."""
    quads = np.asarray(codes, np.uint8).reshape(*codes.shape[:-1], -1, 4)
    return np.bitwise_or.reduce(quads << _SHIFTS, axis=-1)


def unpack2(packed: np.ndarray) -> np.ndarray:
    """The inverse of `pack2`: bytes uint8 `[..., m]` -> codes uint8 `[..., 4*m]`."""
    packed = np.asarray(packed, np.uint8)
    return ((packed[..., None] >> _SHIFTS) & 3).reshape(*packed.shape[:-1], -1)


def key_levels(layout: KVLayout) -> np.ndarray:
    """float32 `[Dk]`: highest code of each permuted K channel, 15 for the promoted (first) ones, else 3."""
    return np.where(np.arange(layout.k_dim) < layout.promoted, LEVELS_4BIT, LEVELS_2BIT).astype(F32)


def quantize_keys(layout: KVLayout, x: np.ndarray) -> Triple:
    """Quantizes K per channel over the tokens of a block.

    Args:
        layout: Gives k_dim and promoted.
        x: float32 `[..., 64, Dk]`, centred, permuted, relative to the reference.

    Returns:
        codes uint8 `[..., 64, Dk]`, scale codes (E4M3) uint8 `[..., Dk]`, zero points int8 `[..., Dk]`.
    """
    levels = key_levels(layout)
    clip = np.where(levels == LEVELS_4BIT, CLIP_4BIT, CLIP_2BIT)
    top, bottom = x.max(axis=-2), x.min(axis=-2)
    half = clip * ((top - bottom) / F32(2))
    middle = (top + bottom) / F32(2)
    scale_codes = e4m3_up(half * F32(2) / levels)
    scale = e4m3_decode(scale_codes)
    zero = np.clip(np.rint((middle - half) / scale), F32(-128), F32(127))
    codes = np.clip(np.rint(x / scale[..., None, :]) - zero[..., None, :], F32(0), levels)
    return codes.astype(np.uint8), scale_codes, zero.astype(np.int8)


def quantize_values(layout: KVLayout, y: np.ndarray, v_ref: np.ndarray) -> Triple:
    """Quantizes rotated V per token and group.

    Args:
        layout: Gives v_dim and the group.
        y: float32 `[..., 64, Dv]`, rotated.
        v_ref: float32 `[..., ng]`, powers of two.

    Returns:
        codes uint8 `[..., 64, Dv]`, scale codes and zero codes (E4M3) uint8 `[..., 64, ng]`.
    """
    relative = _value_groups(layout, y) / np.asarray(v_ref, F32)[..., None, :, None]
    top, bottom = relative.max(axis=-1), relative.min(axis=-1)
    half = CLIP_2BIT * ((top - bottom) / F32(2))
    scale_codes = e4m3_up(half * F32(2) / LEVELS_2BIT)
    scale = e4m3_decode(scale_codes)
    low = (top + bottom) / F32(2) - VALUE_OFFSETS[:, None] * scale
    zero_codes = e4m3_rne(np.clip(low, -E4M3_MAX, E4M3_MAX))
    steps = (relative - e4m3_decode(zero_codes)[..., None]) / scale[..., None]
    codes = np.clip(np.rint(steps * VALUE_STRETCH - VALUE_SHIFT), F32(0), LEVELS_2BIT)
    return codes.astype(np.uint8).reshape(y.shape), scale_codes, zero_codes


def quantize_block(layout: KVLayout, rows: np.ndarray, v_ref: np.ndarray) -> np.ndarray:
    """Bytes of blocks from their ring rows.

    Args:
        layout: A layout with blocks.
        rows: float16 or float32 `[..., 64, Dk+Dv]`: the ring rows of the block's tokens in order.
        v_ref: float32 `[..., ng]`.

    Returns:
        uint8 `[..., block_bytes]`; padding bytes are zero.
    """
    rows = np.asarray(rows).astype(F32)
    quantize = _int8_parts if layout.format == "int8" else _mkv2_parts
    parts = quantize(layout, rows[..., : layout.k_dim], rows[..., layout.k_dim :], v_ref)
    block = np.zeros((*rows.shape[:-2], layout.block_bytes), np.uint8)
    for name, section in layout.sections.items():
        block[..., section.offset : section.end] = parts[name].reshape(*rows.shape[:-2], section.nbytes)
    return block


def _mkv2_parts(layout: KVLayout, x: np.ndarray, y: np.ndarray, v_ref: np.ndarray) -> dict[str, np.ndarray]:
    k_codes, k_scale, k_zero = quantize_keys(layout, x)
    v_codes, v_scale, v_zero = quantize_values(layout, y, v_ref)
    return {
        "k_lo": pack2(k_codes & 3),
        "k_hi": pack2(k_codes[..., : layout.promoted] >> 2),
        "k_scale": k_scale,
        "k_zero": k_zero.view(np.uint8),
        "v_codes": pack2(v_codes),
        "v_scale": v_scale,
        "v_zero": v_zero,
    }


def _value_groups(layout: KVLayout, y: np.ndarray) -> np.ndarray:
    return y.reshape(*y.shape[:-1], layout.num_v_groups, layout.v_group)


def _int8_parts(layout: KVLayout, x: np.ndarray, y: np.ndarray, v_ref: np.ndarray) -> dict[str, np.ndarray]:
    k_codes, k_scale = quantize_symmetric(x, -2)
    relative = _value_groups(layout, y) / np.asarray(v_ref, F32)[..., None, :, None]
    v_codes, v_scale = quantize_symmetric(relative, -1)
    codes = {"k_codes": k_codes.view(np.uint8), "v_codes": v_codes.view(np.uint8)}
    return codes | {"k_scale": k_scale, "v_scale": v_scale}


def block_section(layout: KVLayout, block: np.ndarray, name: str) -> np.ndarray:
    """Bytes of a section, uint8 `[..., *section.shape]`, of blocks uint8 or int8 `[..., block_bytes]`."""
    section = layout.sections[name]
    part = np.asarray(block).view(np.uint8)[..., section.offset : section.end]
    return part.reshape(*part.shape[:-1], *section.shape)


def dequantize_block(layout: KVLayout, block: np.ndarray, v_ref: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Values of blocks: what attention sees.

    Args:
        layout: A layout with blocks.
        block: uint8 or int8 `[..., block_bytes]`.
        v_ref: float32 `[..., ng]`.

    Returns:
        x float32 `[..., 64, Dk]` (centred, permuted, relative K) and y float32 `[..., 64, Dv]` (rotated V).
    """
    if layout.format == "int8":
        return _dequantize_int8(layout, block, v_ref)
    codes = unpack2(block_section(layout, block, "k_lo")).astype(F32)
    codes[..., : layout.promoted] += F32(4) * unpack2(block_section(layout, block, "k_hi")).astype(F32)
    zero = block_section(layout, block, "k_zero").view(np.int8).astype(F32)
    x = e4m3_decode(block_section(layout, block, "k_scale"))[..., None, :] * (codes + zero[..., None, :])
    v_codes = unpack2(block_section(layout, block, "v_codes")).astype(F32)
    grouped = _value_groups(layout, v_codes)
    scale = e4m3_decode(block_section(layout, block, "v_scale"))[..., None]
    low = e4m3_decode(block_section(layout, block, "v_zero"))[..., None]
    y = (scale * grouped + low) * np.asarray(v_ref, F32)[..., None, :, None]
    return x, y.reshape(v_codes.shape)


def _dequantize_int8(layout: KVLayout, block: np.ndarray, v_ref: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    codes = {name: block_section(layout, block, name).view(np.int8) for name in ("k_codes", "v_codes")}
    x = dequantize_symmetric(codes["k_codes"], block_section(layout, block, "k_scale"), -2)
    grouped = _value_groups(layout, codes["v_codes"])
    y = dequantize_symmetric(grouped, block_section(layout, block, "v_scale"), -1)
    return x, (y * np.asarray(v_ref, F32)[..., None, :, None]).reshape(codes["v_codes"].shape)
