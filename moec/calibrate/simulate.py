"""Attention as decoding over a cache computes it, for a whole text at once.

What query n sees (sinks, quantized blocks, recent tokens in fp16) changes only when a block is flushed. So
queries are worked on in runs that see the same blocks; blocks are packed and unpacked by the reference.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from moec.bundle.geometry import AttentionLayer
from moec.reference.kv_block import dequantize_block, hadamard, quantize_block
from moec.reference.kv_cache import Calibration, permute, prepare_rows
from moec.reference.kv_layout import KVLayout

F32 = np.float32
LOWEST = -1e30
_MOST_QUERIES = 512


def cached_attention(
    layer: AttentionLayer,
    layout: KVLayout,
    calibration: Calibration,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
    sink_logits: np.ndarray | None = None,
) -> np.ndarray:
    """The output of moec::AsymKVAttention for one slot's first S tokens.

    Args:
        layer: Scale and soft cap.
        layout: A layout with blocks, or an fp format; no window.
        calibration: Of the layer.
        query: float32 `[Hq,S,Dk]` after RoPE and norms, not scaled.
        key, value: float32 `[Hkv,S,Dk]`, `[Hkv,S,Dv]`.
        sink_logits: float32 `[Hq]`, or None.

    Returns:
        float32 `[Hq,S,Dv]`.
    """
    rows = prepare_rows(layout, key.swapaxes(0, 1), value.swapaxes(0, 1), calibration)
    exact = rows.astype(F32).swapaxes(0, 1)  # [Hkv,S,Dk+Dv]
    quantized = _quantized(layout, calibration, exact)
    queries = _queries(layer, layout, calibration, query)
    sinks = _sinks(layer, layout, calibration, query, sink_logits)
    runs = [
        _run(layer, layout, torch.from_numpy(exact), quantized, queries[:, :, a:b], a, sinks)
        for a, b in query_runs(layout, query.shape[1])
    ]
    out = torch.cat(runs, 2).numpy()  # [Hkv,G,S,Dv]
    out = hadamard(out, layout.v_group) if layout.quantized else out
    return out.reshape(query.shape[0], query.shape[1], layout.v_dim)


def query_runs(layout: KVLayout, tokens: int) -> Iterator[tuple[int, int]]:
    """(first, end) of runs of queries that see the same blocks, at most 512 long."""
    start = 0
    while start < tokens:
        end = min(tokens, start + _MOST_QUERIES)
        if layout.quantized:
            blocks = layout.quantized_blocks(start) + 1
            end = min(end, layout.sink_tokens + layout.recent_tokens + layout.block_tokens * blocks)
        yield start, end
        start = end


def _quantized(layout: KVLayout, calibration: Calibration, exact: np.ndarray) -> torch.Tensor:
    """What blocks hold, dequantized: `[Hkv, blocks*64, Dk+Dv]`."""
    count = layout.quantized_blocks(max(0, exact.shape[1] - 1))
    if not count:
        return torch.zeros(exact.shape[0], 0, exact.shape[2])
    first, size = layout.sink_tokens, layout.block_tokens
    rows = exact[:, first : first + count * size].reshape(exact.shape[0], count, size, -1)
    v_ref = calibration.v_ref[:, None]
    x, y = dequantize_block(layout, quantize_block(layout, rows, v_ref), v_ref)
    return torch.from_numpy(np.concatenate([x, y], -1).reshape(exact.shape[0], count * size, -1))


def _queries(
    layer: AttentionLayer, layout: KVLayout, calibration: Calibration, query: np.ndarray
) -> torch.Tensor:
    """`[Hkv,G,S,Dk]`, scaled for what is stored."""
    grouped = query.reshape(layout.num_kv_heads, -1, *query.shape[1:])
    if layout.quantized:
        by_token = permute(grouped.transpose(1, 2, 0, 3), calibration.k_order) * calibration.k_ref
        grouped = by_token.transpose(2, 0, 1, 3)
    return torch.from_numpy(np.ascontiguousarray(grouped * F32(layer.scale)))


def _sinks(
    layer: AttentionLayer,
    layout: KVLayout,
    calibration: Calibration,
    query: np.ndarray,
    sink_logits: np.ndarray | None,
) -> torch.Tensor | None:
    """`[Hkv,G,S,1]`: K is stored without its mean, so sinks lose scale*q.mean too."""
    if sink_logits is None:
        return None
    grouped = query.reshape(layout.num_kv_heads, -1, *query.shape[1:])
    shift = np.zeros(grouped.shape[:3], F32)
    if layout.quantized:
        mean = np.zeros_like(calibration.k_mean)
        np.put_along_axis(mean, calibration.k_order.astype(np.int64), calibration.k_mean, axis=-1)
        shift = np.einsum("hgsd,hd->hgs", grouped, mean) * F32(layer.scale)
    sinks = sink_logits.reshape(layout.num_kv_heads, -1, 1) - shift
    return torch.from_numpy(sinks.astype(F32))[..., None]


def _run(
    layer: AttentionLayer,
    layout: KVLayout,
    exact: torch.Tensor,
    quantized: torch.Tensor,
    queries: torch.Tensor,
    start: int,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Queries `[Hkv,G,n,Dk]` from position `start` on, which all see the same blocks -> `[Hkv,G,n,Dv]`."""
    heads, group, count, dk = queries.shape
    flushed = layout.block_tokens * layout.quantized_blocks(start)
    first = layout.ring_sinks + flushed
    parts = [exact[:, : layout.ring_sinks], quantized[:, :flushed], exact[:, first : start + count]]
    seen = torch.cat(parts, 1) if layout.quantized else exact[:, : start + count]
    seen = seen[:, : start + count]  # fewer tokens than sinks
    logits = queries.reshape(heads, group * count, dk) @ seen[..., :dk].transpose(1, 2)
    logits = logits.reshape(heads, group, count, -1)
    if layer.softcap:
        logits = torch.tanh(logits / layer.softcap) * layer.softcap
    future = torch.arange(seen.shape[1])[None] > torch.arange(start, start + count)[:, None]
    logits = logits.masked_fill(future, LOWEST)
    if sinks is not None:
        logits = torch.cat([logits, sinks[:, :, start : start + count]], -1)
    p = torch.softmax(logits, -1)[..., : seen.shape[1]]
    return (p.reshape(heads, group * count, -1) @ seen[..., dk:]).reshape(heads, group, count, -1)
