"""The ONNX function body of moec::AsymKVAttention, generated for one layer variant.

It has no loop: a block that is flushed inside the chunk is computed from the rows that the ring or the chunk
holds, and masks decide what a query sees. The state is bit-identical to the reference.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moec.dialect.block_body import dequantize, hadamard, quantize
from moec.dialect.emit import F32, I8, I32, I64, U8, Body, Value
from moec.errors import MoecError
from moec.reference.attention import layout_of_tensors
from moec.reference.kv_cache import KVLayout

_MASKED = -1e30
_HALF_MAX = 65504.0


@dataclass(frozen=True)
class AttentionVariant:
    """Everything that a body depends on."""

    layout: KVLayout
    num_heads: int
    scale: float
    softcap: float
    has_sink_logits: bool

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.num_heads // self.layout.num_kv_heads

    @property
    def label(self) -> str:
        kv = self.layout
        return f"{kv.format}_h{self.num_heads}x{kv.num_kv_heads}_d{kv.k_dim}x{kv.v_dim}"

    @classmethod
    def of_node(cls, attributes: dict[str, Any], shape: Callable[[str], tuple]) -> AttentionVariant:
        """From completed attributes and the shapes of ring, blocks, k_order and sink_logits."""
        k_dim, ring = shape("k_order")[1], shape("ring")
        names = ("format", "window", "promoted", "sink_tokens", "recent_tokens", "rollback_tokens")
        # The batch dimension plays no part in a body and may be symbolic.
        sizes = {name: attributes[name] for name in (*names, "block_tokens")}
        layout = layout_of_tensors((1, *shape("blocks")[1:]), (1, *ring[1:]), ring[3] - k_dim, **sizes)
        heads = shape("sink_logits")[0]
        if heads % layout.num_kv_heads:
            raise MoecError(f"{heads} query heads over {layout.num_kv_heads} KV heads")
        flags = attributes["softcap"], bool(attributes["has_sink_logits"])
        return cls(layout, heads, attributes["scale"], *flags)


class _Attention:
    """Emits the body; values are named as in DESIGN.md, n = ring rows + S is the width of the token store."""

    def __init__(self, variant: AttentionVariant) -> None:
        self.variant, self.kv, self.body = variant, variant.layout, Body()
        body, ring = self.body, self.kv.ring_dtype
        self.q, self.k, self.v = (body.input(name, F32) for name in "qkv")
        self.blocks, self.ring = body.input("blocks", I8), body.input("ring", ring)
        self.slots = body.input("slot_ids", I32).cast(I64)
        self.k_mean, self.k_ref = body.input("k_mean", F32), body.input("k_ref", F32)
        self.k_order = body.input("k_order", I32).cast(I64)
        self.v_ref = body.input("v_ref", F32)
        self.batch, self.steps = self.q.size(0), self.q.size(1)
        self.length = body.input("lengths", I32).cast(I64).gather(self.slots)  # [b]
        self.count = body.input("num_tokens", I32).cast(I64)  # [b]
        self.end = self.length + self.count
        step = body.arange(self.steps)
        self.position = self.length.unsqueeze(1) + step  # [b,S]
        self.valid = step < self.count.unsqueeze(1)  # [b,S]

    def emit(self) -> Body:
        store = self._store()
        self._write_ring(store)
        values = self._clean(store)  # [b,n,H,D] float32
        keys, mask = values.transpose(0, 2, 1, 3), self._store_mask()
        if self.kv.quantized:
            blocks = self._flush(values)
            k, v = dequantize(self.kv, blocks.transpose(0, 2, 1, 3), self.v_ref)
            dequantized = self.body.concat([k, v], 4).reshape(0, 0, -1, self.kv.row_dim)
            keys = self.body.concat([dequantized, keys], 2)
            mask = self.body.concat([self._block_mask(), mask], 2)
        else:
            self.body.result("blocks_out", self.blocks)
        self._attend(keys, mask)
        return self.body

    def _blocks_at(self, length: Value) -> Value:
        """nq(length)."""
        front = self.kv.sink_tokens + self.kv.recent_tokens
        return (length - front).maximum(0) // self.kv.block_tokens

    def _permuted(self, x: Value) -> Value:
        """x `[b,S,Hkv,Dk]`, channels in the order of the layer."""
        kv = self.kv
        order = self.k_order.expand(self.batch, self.steps, kv.num_kv_heads, kv.k_dim)
        return x.gather_elements(order, 3)

    def _new_rows(self) -> Value:
        """`[b,S,H,D]` in the ring's type; padding is zero."""
        k, v = self.k, self.v
        if self.kv.quantized:
            k = (self._permuted(k) - self.k_mean) / self.k_ref
            v = hadamard(v.clip(-_HALF_MAX, _HALF_MAX), self.kv.v_group)
        rows = self.body.concat([k, v], 3)
        if self.kv.format != "fp32":
            rows = rows.clip(-_HALF_MAX, _HALF_MAX)
        return self.body.where(self.valid.unsqueeze(2, 3), rows, 0.0).cast(self.kv.ring_dtype)

    def _store(self) -> Value:
        """Ring rows before this call, then the new rows: `[b,n,H,D]`."""
        old = self.ring.gather(self.slots).transpose(0, 2, 1, 3)
        return self.body.concat([old, self._new_rows()], 1)

    def _ring_tokens(self, length: Value) -> tuple[Value, Value]:
        """Newest token of each ring row at a length `[b]`, and whether there is one: both `[b,rows]`."""
        sinks, rows = self.kv.ring_sinks, self.kv.ring_rows
        row = self.body.constant(np.arange(rows)[None], I64)
        last = (length - 1).unsqueeze(1)
        recent = last - (last - row) % self.kv.ring_period
        live = (recent >= sinks) & (row >= sinks) | (row < sinks) & (row <= last)
        return self.body.where(row < sinks, row, recent), live

    def _write_ring(self, store: Value) -> None:
        rows = self.kv.ring_rows
        token, live = self._ring_tokens(self.end)
        new = live & (token >= self.length.unsqueeze(1))
        offset = token - self.length.unsqueeze(1) + rows
        row = self.body.constant(np.arange(rows)[None], I64)
        written = store.gather_rows(self.body.where(new, offset, row))
        self._result("ring_out", self.ring, written.transpose(0, 2, 1, 3))

    def _result(self, name: str, state: Value, rows: Value) -> None:
        """Puts the rows `[b,...]` that had tokens into the state `[B,...]`."""
        slot = self.body.arange(state.size(0)).unsqueeze(1)
        match = (slot.equal(self.slots) & (self.count > 0)).cast(I32)  # [B,b]
        active = match.reduce("ReduceMax", 1, keepdims=0) > 0
        own = self.body.arange(state.size(0))
        source = self.body.where(active, match.argmax(1) + state.size(0), own)
        self.body.result(name, self.body.concat([state, rows], 0).gather(source))

    def _store_tokens(self) -> tuple[Value, Value]:
        """Token of each store row and whether the row holds one: `[b,n]`."""
        token, live = self._ring_tokens(self.length)
        return self.body.concat([token, self.position], 1), self.body.concat([live, self.valid], 1)

    def _clean(self, store: Value) -> Value:
        """The store in float32; rows that hold nothing are zero (they may be garbage, and 0*NaN is NaN)."""
        _, live = self._store_tokens()
        return self.body.where(live.unsqueeze(2, 3), store.cast(F32), 0.0)

    def _store_mask(self) -> Value:
        """Which store rows a query sees: `[b,S,n]`."""
        token, live = (x.unsqueeze(1) for x in self._store_tokens())
        query = self.position.unsqueeze(2)
        mask = live & (token <= query)
        if self.kv.window:
            return mask & (token > query - self.kv.window)
        if not self.kv.quantized:
            return mask
        sinks = self.kv.sink_tokens
        first = self._blocks_at(query) * self.kv.block_tokens + sinks
        return mask & ((token < sinks) | (token >= first))

    def _block_mask(self) -> Value:
        """Which tokens of blocks a query sees: `[b,S,NB*64]`."""
        block = np.arange(self.kv.num_blocks * self.kv.block_tokens) // self.kv.block_tokens
        return self.body.constant(block[None, None], I64) < self._blocks_at(self.position.unsqueeze(2))

    def _flush(self, values: Value) -> Value:
        """Quantizes what became complete; sets blocks_out; returns uint8 `[b,NB,H,bytes]`."""
        kv, body = self.kv, self.body
        most = body.arange((self.steps + (kv.block_tokens - 1)) // kv.block_tokens)  # [M]
        first, last = self._blocks_at(self.length).unsqueeze(1), self._blocks_at(self.end).unsqueeze(1)
        in_block = body.constant(np.arange(kv.block_tokens)[None, None], I64)
        token = (first + most).unsqueeze(2) * kv.block_tokens + in_block + kv.sink_tokens  # [b,M,64]
        start = self.length.unsqueeze(1, 2)
        ring_row = (token - kv.sink_tokens) % kv.ring_period + kv.sink_tokens
        index = body.where(token >= start, token - start + kv.ring_rows, ring_row)
        index = index.minimum(self.steps + (kv.ring_rows - 1)).reshape(self.batch, -1)
        rows = values.gather_rows(index).reshape(self.batch, -1, kv.block_tokens, kv.num_kv_heads, kv.row_dim)
        packed = quantize(kv, rows.transpose(0, 3, 1, 2, 4), self.v_ref)  # [b,H,M,bytes]
        old = self.blocks.cast(U8).gather(self.slots).transpose(0, 2, 1, 3)
        block = body.constant(np.arange(kv.num_blocks)[None], I64)
        new = (block >= first) & (block < last)
        pool = body.concat([old, packed.transpose(0, 2, 1, 3)], 1)
        blocks = pool.gather_rows(body.where(new, block - first + kv.num_blocks, block))
        self._result("blocks_out", self.blocks, blocks.transpose(0, 2, 1, 3).cast(I8))
        return blocks

    def _queries(self) -> tuple[Value, Value | None]:
        """Scaled queries `[b,H,G*S,Dk]` and the sink logits `[b,H,G,S,1]`."""
        kv, variant = self.kv, self.variant
        heads, group = kv.num_kv_heads, variant.group
        q = self.q.reshape(0, 0, heads, group, kv.k_dim)
        sink = None
        if variant.has_sink_logits:
            logits = self.body.input("sink_logits", F32).reshape(1, heads, group, 1, 1)
            sink = logits.expand(self.batch, heads, group, self.steps, 1)
        if kv.quantized:
            order = self.k_order.unsqueeze(1).expand(self.batch, self.steps, heads, group, kv.k_dim)
            q = q.gather_elements(order, 4)
            if sink is not None:
                shift = (q * self.k_mean.unsqueeze(1)).reduce("ReduceSum", 4) * variant.scale
                sink = sink - shift.transpose(0, 2, 3, 1, 4)
            q = q * self.k_ref.unsqueeze(1)
        q = (q * variant.scale).transpose(0, 2, 3, 1, 4)
        return q.reshape(0, 0, -1, kv.k_dim), sink

    def _attend(self, keys: Value, mask: Value) -> None:
        """keys `[b,H,N,D]`, mask `[b,S,N]`; sets out."""
        kv, group = self.kv, self.variant.group
        q, sink = self._queries()
        k, v = keys.slice(0, kv.k_dim, 3), keys.slice(kv.k_dim, kv.row_dim, 3)
        logits = q @ k.transpose(0, 1, 3, 2)
        if self.variant.softcap:
            logits = (logits / self.variant.softcap).unary("Tanh") * self.variant.softcap
        logits = logits.reshape(self.batch, kv.num_kv_heads, group, self.steps, keys.size(2))
        logits = self.body.where(mask.unsqueeze(1, 2), logits, _MASKED)
        if sink is not None:
            logits = self.body.concat([logits, sink], 4)
        p = logits.unary("Softmax", axis=-1).slice(0, keys.size(2), 4)
        out = p.reshape(self.batch, kv.num_kv_heads, -1, keys.size(2)) @ v
        if kv.quantized:
            out = hadamard(out, kv.v_group)
        out = out.reshape(self.batch, kv.num_kv_heads, group, self.steps, kv.v_dim).transpose(0, 3, 1, 2, 4)
        out = out.reshape(self.batch, self.steps, self.variant.num_heads * kv.v_dim)
        self.body.result("out", self.body.where(self.valid.unsqueeze(2), out, 0.0))


def attention_body(variant: AttentionVariant) -> Body:
    """Nodes whose inputs and outputs have the names of `OPS["AsymKVAttention"]`; float32 activations."""
    return _Attention(variant).emit()


__all__ = ["AttentionVariant", "attention_body"]
