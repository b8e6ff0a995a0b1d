"""Running statistics of one layer's queries, keys and values: fixed memory, however long the text."""

from __future__ import annotations

import numpy as np

from moec.reference.kv_block import CLIP_2BIT, hadamard
from moec.reference.kv_layout import KVLayout


class LayerStatistics:
    """Sums over calibration windows for one attention layer, per KV head.

    Only tokens behind the sinks count, in whole blocks of 64: what the cache will quantize. Sums are float64.

    Attributes:
        tokens, blocks: How many of them were seen.
        k_sum, q_square: `[Hkv, Dk]` sums over tokens (q: also over the query heads of a KV head, averaged).
        k_range_square, k_range_max: `[Hkv, Dk]`, channel (max - min) over a block: sum of squares, largest.
        k_low, k_high: `[Hkv, Dk]`, smallest and largest key.
        v_range_square, v_range_max: `[Hkv, ng]`, range over a group of a token's rotated values.
        v_high: `[Hkv, ng]`, largest magnitude of a rotated value.
    """

    def __init__(self, layout: KVLayout) -> None:
        self.layout = layout
        self.tokens = self.blocks = 0
        keys, groups = (layout.num_kv_heads, layout.k_dim), (layout.num_kv_heads, layout.num_v_groups)
        self.k_sum, self.q_square = np.zeros(keys), np.zeros(keys)
        self.k_range_square, self.k_range_max = np.zeros(keys), np.zeros(keys)
        self.k_low, self.k_high = np.full(keys, np.inf), np.full(keys, -np.inf)
        self.v_range_square, self.v_range_max = np.zeros(groups), np.zeros(groups)
        self.v_high = np.zeros(groups)

    def add(self, q: np.ndarray, k: np.ndarray, v: np.ndarray) -> None:
        """Add one window.

        Args:
            q: float32 `[Hq, S, Dk]` after RoPE and norms, before the softmax scale.
            k: float32 `[Hkv, S, Dk]`, likewise.
            v: float32 `[Hkv, S, Dv]`.
        """
        first, size = self.layout.sink_tokens, self.layout.block_tokens
        count = max(0, q.shape[1] - first) // size
        if count == 0:
            return
        kept = slice(first, first + count * size)
        self.tokens += count * size
        self.blocks += count
        self._add_queries(q[:, kept])
        self._add_keys(k[:, kept].reshape(k.shape[0], count, size, -1))
        self._add_values(v[:, kept])

    def _add_queries(self, q: np.ndarray) -> None:
        heads = self.layout.num_kv_heads
        per_head = q.astype(np.float64).reshape(heads, -1, *q.shape[1:])
        self.q_square += np.square(per_head).mean(axis=1).sum(axis=1)

    def _add_keys(self, blocks: np.ndarray) -> None:
        spread = np.ptp(blocks, axis=2).astype(np.float64)
        self.k_sum += blocks.sum(axis=(1, 2), dtype=np.float64)
        self.k_range_square += np.square(spread).sum(axis=1)
        self.k_range_max = np.maximum(self.k_range_max, spread.max(axis=1))
        self.k_low = np.minimum(self.k_low, blocks.min(axis=(1, 2)))
        self.k_high = np.maximum(self.k_high, blocks.max(axis=(1, 2)))

    def _add_values(self, v: np.ndarray) -> None:
        rotated = hadamard(v, self.layout.v_group)
        grouped = rotated.reshape(*v.shape[:2], self.layout.num_v_groups, self.layout.v_group)
        spread = np.ptp(grouped, axis=-1).astype(np.float64)
        self.v_range_square += np.square(spread).sum(axis=1)
        # The zero of a group may be as large as its values: count them as a range for the overflow guard.
        top = np.abs(grouped).max(axis=-1).astype(np.float64)
        self.v_high = np.maximum(self.v_high, top.max(axis=1))
        reach = 2 * top / float(CLIP_2BIT)
        self.v_range_max = np.maximum(self.v_range_max, np.maximum(spread, reach).max(axis=1))

    def is_finite(self) -> bool:
        """False when the model produced NaN or infinity in this layer."""
        sums = (self.k_sum, self.q_square, self.k_range_square, self.v_range_square)
        return all(np.isfinite(x).all() for x in sums)
