"""The KV cache of one attention layer in NumPy: kernels, function bodies and documents answer to it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moec.errors import MoecError
from moec.reference.e4m3 import E4M3_POSITIVE, E4M3_VALUES, e4m3_decode, e4m3_rne, e4m3_up
from moec.reference.kv_block import (
    block_section,
    dequantize_block,
    hadamard,
    pack2,
    quantize_block,
    quantize_keys,
    quantize_values,
    to_half,
    unpack2,
)
from moec.reference.kv_layout import (
    FLOAT_FORMATS,
    FORMATS,
    QUANTIZED_FORMATS,
    KVLayout,
    Section,
    promoted_channels,
    value_group,
)

__all__ = [
    "E4M3_POSITIVE",
    "E4M3_VALUES",
    "FLOAT_FORMATS",
    "FORMATS",
    "QUANTIZED_FORMATS",
    "Calibration",
    "KVLayout",
    "KVState",
    "Section",
    "block_section",
    "dequantize_block",
    "e4m3_decode",
    "e4m3_rne",
    "e4m3_up",
    "hadamard",
    "neutral_calibration",
    "pack2",
    "prepare_rows",
    "promoted_channels",
    "quantize_block",
    "quantize_keys",
    "quantize_values",
    "to_half",
    "unpack2",
    "value_group",
]

F32 = np.float32


@dataclass(frozen=True)
class Calibration:
    """Static tensors of a layer, per KV head.

    Args:
        k_mean: float32 `[Hkv,Dk]`, mean of K after RoPE, in permuted order.
        k_ref: float32 `[Hkv,Dk]`, powers of two, in permuted order.
        k_order: int32 `[Hkv,Dk]`, permuted channel c is channel k_order[c]; promoted channels first.
        v_ref: float32 `[Hkv,ng]`, powers of two.
    """

    k_mean: np.ndarray
    k_ref: np.ndarray
    k_order: np.ndarray
    v_ref: np.ndarray


def neutral_calibration(layout: KVLayout) -> Calibration:
    """The calibration that changes nothing: mean 0, references 1, identity order."""
    shape = (layout.num_kv_heads, layout.k_dim)
    order = np.broadcast_to(np.arange(layout.k_dim, dtype=np.int32), shape).copy()
    ref = np.ones((layout.num_kv_heads, layout.num_v_groups), F32)
    return Calibration(np.zeros(shape, F32), np.ones(shape, F32), order, ref)


def permute(x: np.ndarray, order: np.ndarray) -> np.ndarray:
    """Gathers channels per head: x `[..., H, D]`, order int `[H, D]` -> `[..., H, D]`."""
    return np.take_along_axis(x, np.broadcast_to(order, x.shape).astype(np.int64), axis=-1)


def prepare_rows(layout: KVLayout, k: np.ndarray, v: np.ndarray, calibration: Calibration) -> np.ndarray:
    """What append writes to the ring for new keys and values.

    Args:
        layout: The layer's layout.
        k: float32 `[..., Hkv, Dk]` after RoPE and norms.
        v: float32 `[..., Hkv, Dv]`.
        calibration: Ignored for layers without blocks.

    Returns:
        `[..., Hkv, Dk+Dv]` of `layout.ring_dtype`. Infinite and huge numbers are clamped to +-65504 (V also
        before its rotation, where inf - inf would be NaN); fp32 is stored as it is.
    """
    k, v = np.asarray(k, F32), np.asarray(v, F32)
    if layout.quantized:
        with np.errstate(over="ignore"):  # an overflow is clamped below
            k = (permute(k, calibration.k_order) - calibration.k_mean) / calibration.k_ref
        v = hadamard(np.clip(v, F32(-65504), F32(65504)), layout.v_group)
    rows = np.concatenate([k, v], axis=-1)
    return rows if layout.format == "fp32" else to_half(rows)


@dataclass
class KVState:
    """Cache tensors of a layer for all slots: `blocks` int8 and `ring`, shapes from the layout."""

    layout: KVLayout
    blocks: np.ndarray
    ring: np.ndarray

    @classmethod
    def empty(cls, layout: KVLayout, batch: int) -> KVState:
        """Zeroed state. Zeroing is not needed: what lies behind a slot's length is never read."""
        ring = np.zeros(layout.ring_shape(batch), layout.ring_dtype)
        return cls(layout, np.zeros(layout.blocks_shape(batch), np.int8), ring)

    def copy(self) -> KVState:
        return KVState(self.layout, self.blocks.copy(), self.ring.copy())

    def append(self, slot: int, token: int, row: np.ndarray) -> None:
        """Writes the prepared row `[Hkv, Dk+Dv]` of token (its position) to the ring of a slot."""
        if not 0 <= token < self.layout.context:
            what = f"token {token} does not fit a context of {self.layout.context}"
            raise MoecError(what, where=f"slot {slot}")
        self.ring[slot, :, self.layout.ring_row(token)] = row

    def flush(self, slot: int, length: int, v_ref: np.ndarray) -> bool:
        """Quantizes the block that is complete once token `length` has been appended; True if there is one.

        Args:
            slot: Row of the state.
            length: Tokens cached before the append.
            v_ref: float32 `[Hkv,ng]`.
        """
        block = self.layout.quantized_blocks(length)
        if self.layout.quantized_blocks(length + 1) <= block:
            return False
        first = self.layout.sink_tokens + self.layout.block_tokens * block
        rows = self.layout.ring_row(np.arange(first, first + self.layout.block_tokens))
        packed = quantize_block(self.layout, self.ring[slot][:, rows], v_ref)
        self.blocks[slot, :, block] = packed.view(np.int8)
        return True
