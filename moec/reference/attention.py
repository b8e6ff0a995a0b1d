"""The operator moec::AsymKVAttention in NumPy.

The state (blocks, ring) is bit-exact truth. Logits, softmax and the weighted sum are accumulated in float64:
the output is the value that float32 kernels approach. The rotation of V is undone in float32.
"""

from __future__ import annotations

import numpy as np

from moec.errors import MoecError
from moec.reference.kv_cache import (
    QUANTIZED_FORMATS,
    Calibration,
    KVLayout,
    KVState,
    dequantize_block,
    hadamard,
    permute,
    prepare_rows,
)

F32, F64 = np.float32, np.float64
_UNBOUNDED = 2**31 - 1


def layout_of_tensors(
    blocks_shape: tuple[int, ...],
    ring_shape: tuple[int, ...],
    v_dim: int,
    *,
    format: str,
    window: int,
    promoted: int,
    sink_tokens: int,
    recent_tokens: int,
    rollback_tokens: int,
    block_tokens: int = 64,
) -> KVLayout:
    """The layout behind an op's tensors; its context is the most tokens that they can hold.

    Raises:
        MoecError: the shapes of the tensors are not those of the layout.
    """
    rows, heads = ring_shape[2], ring_shape[1]
    if window:
        context = rows if rows < window + rollback_tokens else _UNBOUNDED
    elif format in QUANTIZED_FORMATS:
        context = sink_tokens + recent_tokens + block_tokens * (blocks_shape[2] + 1) - 1
    else:
        context = rows
    layout = KVLayout(
        format, heads, ring_shape[3] - v_dim, v_dim, context, window, block_tokens, promoted,
        sink_tokens, recent_tokens, rollback_tokens,
    )  # fmt: skip
    want = layout.blocks_shape(ring_shape[0]), layout.ring_shape(ring_shape[0])
    if (tuple(blocks_shape), tuple(ring_shape)) != want:
        raise MoecError(
            f"cache tensors {blocks_shape}, {ring_shape} are not {want}", where=f"format {format}"
        )
    return layout


def _visible(layout: KVLayout, state: KVState, slot: int, length: int, blocks: list) -> tuple:
    """K `[Hkv,n,Dk]` and V `[Hkv,n,Dv]` (float32) that the query at `length` sees, in token order."""
    ring, dk = state.ring[slot], layout.k_dim
    start = max(0, length - layout.window + 1) if layout.window else 0
    if layout.quantized:
        start = layout.sink_tokens + layout.block_tokens * layout.quantized_blocks(length)
    tokens = np.arange(start, length + 1)
    sinks = ring[:, : min(layout.ring_sinks, length + 1)].astype(F32)
    recent = ring[:, layout.ring_row(tokens)].astype(F32)
    k = [sinks[..., :dk], *[x for x, _ in blocks], recent[..., :dk]]
    v = [sinks[..., dk:], *[y for _, y in blocks], recent[..., dk:]]
    return np.concatenate(k, axis=1), np.concatenate(v, axis=1)


def _attend(
    q: np.ndarray, k: np.ndarray, v: np.ndarray, softcap: float, sink: np.ndarray | None
) -> np.ndarray:
    """Softmax attention of one position: q `[Hkv,G,Dk]` (scaled), sink `[Hkv,G]` -> float32 `[Hkv,G,Dv]`."""
    logits = q.astype(F64) @ k.astype(F64).transpose(0, 2, 1)
    if softcap:
        logits = softcap * np.tanh(logits / softcap)
    top = logits.max(axis=-1, keepdims=True)
    if sink is not None:
        top = np.maximum(top, sink[..., None].astype(F64))
    p = np.exp(logits - top)
    total = p.sum(axis=-1, keepdims=True)
    if sink is not None:
        total = total + np.exp(sink[..., None] - top)
    return ((p / total) @ v.astype(F64)).astype(F32)


def _scaled_queries(layout: KVLayout, q: np.ndarray, calibration: Calibration, scale: F32) -> np.ndarray:
    """q `[S,Hq,Dk]` -> float32 `[S,Hkv,G,Dk]`, permuted and scaled for the stored K."""
    grouped = np.asarray(q, F32).reshape(
        len(q), layout.num_kv_heads, q.shape[1] // layout.num_kv_heads, layout.k_dim
    )
    if not layout.quantized:
        return grouped * scale
    grouped = permute(grouped.swapaxes(1, 2), calibration.k_order).swapaxes(1, 2)
    return grouped * calibration.k_ref[:, None, :] * scale


def _centred_sinks(
    layout: KVLayout, q: np.ndarray, calibration: Calibration, scale: F32, sink_logits: np.ndarray
) -> np.ndarray:
    """Sink logits `[S,Hkv,G]` (float64): K is stored without its mean, so the sinks lose scale*q.mean too."""
    grouped = np.asarray(q, F64).reshape(
        len(q), layout.num_kv_heads, q.shape[1] // layout.num_kv_heads, layout.k_dim
    )
    sinks = np.asarray(sink_logits, F64).reshape(1, layout.num_kv_heads, -1)
    if not layout.quantized:
        return np.broadcast_to(sinks, grouped.shape[:3])
    mean = np.zeros_like(calibration.k_mean)
    np.put_along_axis(mean, calibration.k_order.astype(np.int64), calibration.k_mean, axis=-1)
    return sinks - F64(scale) * np.einsum("shgd,hd->shg", grouped, mean.astype(F64))


def _refuse_nan(name: str, x: np.ndarray, slot: int, start: int, layer: int) -> None:
    bad = np.isnan(x).any(axis=(1, 2))
    if bad.any():
        where = f"layer {layer}, slot {slot}, position {start + int(bad.argmax())}"
        raise MoecError(f"NaN in {name}: the KV cache cannot hold it", where=where)


def asym_kv_attention(
    q: np.ndarray,
    k: np.ndarray,
    v: np.ndarray,
    blocks: np.ndarray,
    ring: np.ndarray,
    slot_ids: np.ndarray,
    lengths: np.ndarray,
    num_tokens: np.ndarray,
    k_mean: np.ndarray,
    k_ref: np.ndarray,
    k_order: np.ndarray,
    v_ref: np.ndarray,
    sink_logits: np.ndarray,
    *,
    scale: float,
    window: int = 0,
    softcap: float = 0.0,
    has_sink_logits: int = 0,
    format: str = "mkv2",
    block_tokens: int = 64,
    promoted: int = 0,
    sink_tokens: int = 16,
    recent_tokens: int = 64,
    rollback_tokens: int = 0,
    layout: str = "rows",
    version: int = 1,
    layer: int = 0,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Appends, flushes and attends, token by token: causal attention over the quantized cache.

    Args:
        q: float32 `[b,S,Hq,Dk]`; k: float32 `[b,S,Hkv,Dk]`; v: float32 `[b,S,Hkv,Dv]`; after RoPE and norms.
        blocks, ring: State, shapes as `KVLayout`; not modified.
        slot_ids: int32 `[b]`, slot of each row; two rows that have tokens never share one.
        lengths: int32 `[B]`, tokens cached in each slot.
        num_tokens: int32 `[b]`, valid tokens of each row; 0 = idle.
        k_mean, k_ref, k_order, v_ref: see `Calibration`; ignored for layers without blocks.
        sink_logits: float32 `[Hq]`, joins the softmax without a value where `has_sink_logits`.

    Returns:
        out float32 `[b,S,Hq*Dv]` (zero at idle rows and padding), new blocks, new ring.

    Raises:
        MoecError: NaN in k or v, a slot that is full, tensors that do not fit the attributes.
    """
    if layout != "rows" or version != 1:
        raise MoecError(f"KV layout {layout!r} version {version} is unknown", where=f"layer {layer}")
    kv = layout_of_tensors(
        blocks.shape, ring.shape, v.shape[-1], format=format, window=window, promoted=promoted,
        sink_tokens=sink_tokens, recent_tokens=recent_tokens, rollback_tokens=rollback_tokens,
        block_tokens=block_tokens,
    )  # fmt: skip
    calibration = Calibration(k_mean, k_ref, k_order, v_ref)
    state = KVState(kv, blocks, ring).copy()
    out = np.zeros((*q.shape[:2], q.shape[2] * kv.v_dim), F32)
    for row, count in enumerate(num_tokens):
        slot, start = int(slot_ids[row]), int(lengths[slot_ids[row]])
        _refuse_nan("k", k[row, :count], slot, start, layer)
        _refuse_nan("v", v[row, :count], slot, start, layer)
    for row, count in enumerate(num_tokens):
        slot = int(slot_ids[row])
        queries = _scaled_queries(kv, q[row, :count], calibration, F32(scale))
        sinks = [None] * count
        if has_sink_logits:
            sinks = _centred_sinks(kv, q[row, :count], calibration, F32(scale), sink_logits)
        rows = prepare_rows(kv, k[row, :count], v[row, :count], calibration)
        out[row, :count] = _run_row(state, slot, int(lengths[slot]), rows, queries, sinks, v_ref, softcap)
    return out, state.blocks, state.ring


def _run_row(
    state: KVState,
    slot: int,
    start: int,
    rows: np.ndarray,
    queries: np.ndarray,
    sinks: list | np.ndarray,
    v_ref: np.ndarray,
    softcap: float,
) -> np.ndarray:
    """Steps of one batch row; `state` is updated. Returns float32 `[tokens, Hq*Dv]`."""
    layout = state.layout
    out = np.zeros((len(rows), queries.shape[1] * queries.shape[2] * layout.v_dim), F32)
    seen = [
        dequantize_block(layout, state.blocks[slot, :, i], v_ref)
        for i in range(layout.quantized_blocks(start))
    ]
    for i, row in enumerate(rows):
        state.append(slot, start + i, row)
        k, v = _visible(layout, state, slot, start + i, seen)
        attended = _attend(queries[i], k, v, softcap, sinks[i])
        out[i] = (hadamard(attended, layout.v_group) if layout.quantized else attended).reshape(-1)
        if state.flush(slot, start + i, v_ref):
            seen.append(dequantize_block(layout, state.blocks[slot, :, len(seen)], v_ref))
    return out
