"""Arithmetic of MKV2 blocks as ONNX nodes: the same steps as moec.reference.kv_block, bit for bit."""

from __future__ import annotations

import math

import numpy as np

from moec.dialect.emit import F32, I32, U8, Value
from moec.reference.kv_block import (
    CLIP_2BIT,
    CLIP_4BIT,
    LEVELS_2BIT,
    LEVELS_4BIT,
    VALUE_OFFSETS,
    VALUE_SHIFT,
    VALUE_STRETCH,
    key_levels,
)
from moec.reference.kv_cache import E4M3_POSITIVE, E4M3_VALUES, KVLayout

_SHIFTS = np.array([0, 2, 4, 6], np.uint8)
_VALUES = np.nan_to_num(E4M3_VALUES)  # NaN codes only occur in blocks that hold nothing


def _rounding_thresholds() -> np.ndarray:
    """float32 t such that count(|x| > t) is the code of |x| rounded to nearest even."""
    magnitudes = E4M3_VALUES[:127]
    middle = (magnitudes[:-1] + magnitudes[1:]) / np.float32(2)
    odd = np.arange(middle.size) % 2 == 1
    return np.where(odd, np.nextafter(middle, np.float32(-np.inf)), middle)


def _count_above(x: Value, table: np.ndarray) -> Value:
    """How many entries of an ascending table are below x: int32 of x's shape."""
    above = x.unsqueeze(-1) > x.body.constant(table, F32)
    return above.cast(I32).reduce("ReduceSum", -1, keepdims=0)


def _e4m3_value(codes: Value) -> Value:
    return codes.body.constant(_VALUES, F32).gather(codes.cast(I32))


def _e4m3_up(x: Value) -> Value:
    return _count_above(x, E4M3_POSITIVE).minimum(E4M3_POSITIVE.size - 1) + 1


def _e4m3_rne(x: Value) -> Value:
    code = _count_above(x.unary("Abs"), _rounding_thresholds())
    return x.body.where((x < 0.0) & (code > 0), code + 128, code)


def hadamard(x: Value, group: int) -> Value:
    """As the reference: butterflies over strides 1, 2, 4, ..., then one multiplication."""
    y, stride = x, 1
    while stride < group:
        a, b = y.reshape(-1, group // (2 * stride), 2, stride).split(2, 2)
        y = x.body.concat([a + b, a - b], 2)
        stride *= 2
    shape = x.body.op("Shape", x, dtype=np.int64)
    return x.body.op("Reshape", y * float(np.float32(1.0 / math.sqrt(group))), shape)


def _pack2(codes: Value) -> Value:
    """uint8 `[..., n]` -> `[..., n/4]`, last two axes of rank 5."""
    quads = codes.reshape(0, 0, 0, 0, -1, 4) << codes.body.constant(_SHIFTS, U8)
    a, b, c, d = quads.split(5, 4)
    return ((a | b) | (c | d)).reshape(0, 0, 0, 0, -1)


def _unpack2(packed: Value, tokens: int) -> Value:
    """uint8 `[b,H,NB,tokens*m]` -> float32 `[b,H,NB,tokens,4*m]`."""
    bytes_ = packed.reshape(0, 0, 0, tokens, -1, 1)
    codes = (bytes_ >> packed.body.constant(_SHIFTS, U8)) & packed.body.constant(3, U8)
    return codes.reshape(0, 0, 0, tokens, -1).cast(F32)


def _quantize_keys(layout: KVLayout, x: Value) -> dict[str, Value]:
    levels = key_levels(layout)
    clip = np.where(levels == LEVELS_4BIT, CLIP_4BIT, CLIP_2BIT)
    top_level = x.body.constant(levels, F32)
    top, bottom = x.reduce("ReduceMax", 3), x.reduce("ReduceMin", 3)  # [b,H,M,1,Dk]
    half = x.body.constant(clip, F32) * ((top - bottom) / 2.0)
    middle = (top + bottom) / 2.0
    scale_codes = _e4m3_up(half * 2.0 / top_level)
    scale = _e4m3_value(scale_codes)
    zero = ((middle - half) / scale).unary("Round").clip(-128.0, 127.0)
    codes = ((x / scale).unary("Round") - zero).maximum(0.0).minimum(top_level).cast(U8)
    zero = zero.cast(I32)
    zero = x.body.where(zero < 0, zero + 256, zero)
    promoted = codes.slice(0, layout.promoted, 4) >> x.body.constant(2, U8)
    return {
        "k_lo": _pack2(codes & x.body.constant(3, U8)),
        "k_hi": _pack2(promoted) if layout.promoted else promoted,
        "k_scale": scale_codes,
        "k_zero": zero,
    }


def _quantize_values(layout: KVLayout, y: Value, v_ref: Value) -> dict[str, Value]:
    tokens, groups = layout.block_tokens, layout.num_v_groups
    ref = v_ref.reshape(1, layout.num_kv_heads, 1, 1, groups, 1)
    relative = y.reshape(0, 0, 0, tokens, groups, layout.v_group) / ref
    top, bottom = relative.reduce("ReduceMax", 5), relative.reduce("ReduceMin", 5)
    half = y.body.constant(CLIP_2BIT, F32) * ((top - bottom) / 2.0)
    scale_codes = _e4m3_up(half * 2.0 / float(LEVELS_2BIT))
    scale = _e4m3_value(scale_codes)
    offsets = y.body.constant(VALUE_OFFSETS.reshape(1, 1, 1, tokens, 1, 1), F32)
    zero_codes = _e4m3_rne(((top + bottom) / 2.0 - offsets * scale).clip(-448.0, 448.0))
    steps = (relative - _e4m3_value(zero_codes)) / scale
    codes = (steps * float(VALUE_STRETCH) - float(VALUE_SHIFT)).unary("Round")
    codes = codes.clip(0.0, float(LEVELS_2BIT)).cast(U8).reshape(0, 0, 0, tokens, -1)
    return {"v_codes": _pack2(codes), "v_scale": scale_codes, "v_zero": zero_codes}


def _symmetric(x: Value, axis: int) -> tuple[Value, Value]:
    """Codes of groups along `axis`, as bytes in int32, and amplitude codes (that axis is 1)."""
    amplitude_codes = _e4m3_up(x.unary("Abs").reduce("ReduceMax", axis))
    step = _e4m3_value(amplitude_codes) / 127.0
    codes = (x / step).unary("Round").clip(-127.0, 127.0).cast(I32)
    return x.body.where(codes < 0, codes + 256, codes), amplitude_codes


def _int8_parts(layout: KVLayout, x: Value, y: Value, v_ref: Value) -> dict[str, Value]:
    groups = layout.num_v_groups
    ref = v_ref.reshape(1, layout.num_kv_heads, 1, 1, groups, 1)
    relative = y.reshape(0, 0, 0, layout.block_tokens, groups, layout.v_group) / ref
    k_codes, k_scale = _symmetric(x, 3)
    v_codes, v_scale = _symmetric(relative, 5)
    return {"k_codes": k_codes, "k_scale": k_scale, "v_codes": v_codes, "v_scale": v_scale}


def quantize(layout: KVLayout, rows: Value, v_ref: Value) -> Value:
    """float32 `[b,H,M,64,Dk+Dv]` -> uint8 `[b,H,M,block_bytes]`."""
    body = rows.body
    x, y = rows.slice(0, layout.k_dim, 4), rows.slice(layout.k_dim, layout.row_dim, 4)
    if layout.format == "int8":
        parts = _int8_parts(layout, x, y, v_ref)
    else:
        parts = _quantize_keys(layout, x) | _quantize_values(layout, y, v_ref)
    batch, blocks = rows.size(0), rows.size(2)
    pieces, end = [], 0
    for name, section in [*layout.sections.items(), ("", None)]:
        offset = section.offset if section else layout.block_bytes
        if offset > end:
            zeros = body.constant(np.zeros((1, 1, 1, offset - end)), U8)
            pieces.append(zeros.expand(batch, layout.num_kv_heads, blocks, offset - end))
        if section and section.nbytes:
            pieces.append(parts[name].cast(U8).reshape(batch, layout.num_kv_heads, blocks, section.nbytes))
            end = section.end
    return body.concat(pieces, 3)


def _signed(codes: Value) -> Value:
    """Bytes as int8, in float32."""
    wide = codes.cast(I32)
    return codes.body.where(wide > 127, wide - 256, wide).cast(F32)


def dequantize(layout: KVLayout, blocks: Value, v_ref: Value) -> tuple[Value, Value]:
    """uint8 `[b,H,NB,bytes]` -> K float32 `[b,H,NB,64,Dk]` and V `[b,H,NB,64,Dv]`."""
    body, tokens, groups = blocks.body, layout.block_tokens, layout.num_v_groups
    section = {name: blocks.slice(s.offset, s.end, 3) for name, s in layout.sections.items()}
    if layout.format == "int8":
        return _dequantize_int8(layout, section, v_ref)
    codes = _unpack2(section["k_lo"], tokens)
    if layout.promoted:
        high = _unpack2(section["k_hi"], tokens) * 4.0
        missing = layout.k_dim - layout.promoted
        if missing:
            pads = body.ints(0, 0, 0, 0, 0, 0, 0, 0, 0, missing)
            high = body.op("Pad", high, pads, body.constant(0, F32))
        codes = codes + high
    k = (codes + _signed(section["k_zero"]).unsqueeze(3)) * _e4m3_value(section["k_scale"]).unsqueeze(3)
    grouped = _unpack2(section["v_codes"], tokens).reshape(0, 0, 0, tokens, groups, layout.v_group)
    scale, zero = (
        _e4m3_value(section[name]).reshape(0, 0, 0, tokens, groups, 1) for name in ("v_scale", "v_zero")
    )
    ref = v_ref.reshape(1, layout.num_kv_heads, 1, 1, groups, 1)
    v = (grouped * scale + zero) * ref
    return k, v.reshape(0, 0, 0, tokens, layout.v_dim)


def _dequantize_int8(layout: KVLayout, section: dict[str, Value], v_ref: Value) -> tuple[Value, Value]:
    tokens, groups = layout.block_tokens, layout.num_v_groups
    k_step, v_step = (_e4m3_value(section[name]) / 127.0 for name in ("k_scale", "v_scale"))
    k = _signed(section["k_codes"]).reshape(0, 0, 0, tokens, layout.k_dim) * k_step.unsqueeze(3)
    grouped = _signed(section["v_codes"]).reshape(0, 0, 0, tokens, groups, layout.v_group)
    ref = v_ref.reshape(1, layout.num_kv_heads, 1, 1, groups, 1)
    v = grouped * v_step.reshape(0, 0, 0, tokens, groups, 1) * ref
    return k, v.reshape(0, 0, 0, tokens, layout.v_dim)
