"""State, calibration and attributes of a random AsymKVAttention layer."""

from __future__ import annotations

from collections.abc import Callable
from copy import deepcopy

import numpy as np

from moec.reference.kv_cache import KVLayout


class AttentionCase:
    """Holds the state of 3 slots (random bytes at first: no op may read them) and runs an op on it.

    Args:
        rng: Source of everything random.
        layout: Layout of the layer.
        num_heads: Query heads.
        attributes: Further attributes of the op.
    """

    slots = 3

    def __init__(
        self, rng: np.random.Generator, layout: KVLayout, num_heads: int, **attributes: object
    ) -> None:
        self.rng, self.layout, self.num_heads = rng, layout, num_heads
        self.attributes = {
            "scale": float(np.float32(layout.k_dim**-0.5)),
            "format": layout.format,
            "window": layout.window,
            "promoted": layout.promoted,
            "sink_tokens": layout.sink_tokens,
            "recent_tokens": layout.recent_tokens,
            "rollback_tokens": layout.rollback_tokens,
            **attributes,
        }
        self.blocks = rng.integers(-128, 128, layout.blocks_shape(self.slots)).astype(np.int8)
        self.ring = rng.standard_normal(layout.ring_shape(self.slots)).astype(layout.ring_dtype)
        self.lengths = np.zeros(self.slots, np.int32)
        self.calibration = self._calibration()

    def _calibration(self) -> dict[str, np.ndarray]:
        rng, heads, dim = self.rng, self.layout.num_kv_heads, self.layout.k_dim
        centred = not self.attributes.get("softcap")
        return {
            "k_mean": (rng.standard_normal((heads, dim)) * centred).astype(np.float32),
            "k_ref": (2.0 ** rng.integers(-1, 2, (heads, dim))).astype(np.float32),
            "k_order": np.stack([rng.permutation(dim) for _ in range(heads)]).astype(np.int32),
            "v_ref": (2.0 ** rng.integers(-1, 2, (heads, self.layout.num_v_groups))).astype(np.float32),
            "sink_logits": rng.standard_normal(self.num_heads).astype(np.float32),
        }

    def twin(self) -> AttentionCase:
        """An independent copy of the present state."""
        copy = deepcopy(self)
        copy.rng = self.rng
        return copy

    def tokens(self, rows: int, steps: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Random q, k, v; channels of k differ in size, as in real models."""
        kv, rng = self.layout, self.rng
        q = rng.standard_normal((rows, steps, self.num_heads, kv.k_dim))
        k = rng.standard_normal((rows, steps, kv.num_kv_heads, kv.k_dim)) * np.exp(
            rng.standard_normal(kv.k_dim)
        )
        v = rng.standard_normal((rows, steps, kv.num_kv_heads, kv.v_dim))
        return tuple(x.astype(np.float32) for x in (q, k, v))

    def inputs(self, q: np.ndarray, k: np.ndarray, v: np.ndarray, slots: list, counts: list) -> dict:
        """All inputs of the op by name."""
        return {
            "q": q,
            "k": k,
            "v": v,
            "blocks": self.blocks,
            "ring": self.ring,
            "slot_ids": np.array(slots, np.int32),
            "lengths": self.lengths,
            "num_tokens": np.array(counts, np.int32),
            **self.calibration,
        }

    def run(self, op: Callable, q, k, v, *, slots: list, counts: list) -> np.ndarray:
        """Runs op(**inputs, **attributes), takes over the state and advances the lengths; returns out."""
        out, self.blocks, self.ring = op(**self.inputs(q, k, v, slots, counts), **self.attributes)
        np.add.at(self.lengths, np.array(slots), np.array(counts, np.int32))
        return out

    def state_bytes(self) -> bytes:
        return self.blocks.tobytes() + self.ring.tobytes()
