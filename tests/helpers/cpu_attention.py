"""Random inputs of the CPU's AsymKVAttention: a layout, a calibration, tokens, the lengths of the slots."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moec.reference.kv_cache import Calibration, KVLayout, KVState

F32 = np.float32


def random_calibration(layout: KVLayout, rng: np.random.Generator) -> Calibration:
    """Mean, references (powers of two) and orders that are all different from neutral."""
    h, dk, ng = layout.num_kv_heads, layout.k_dim, layout.num_v_groups
    return Calibration(
        rng.standard_normal((h, dk)).astype(F32),
        (2.0 ** rng.integers(-2, 3, (h, dk))).astype(F32),
        np.stack([rng.permutation(dk) for _ in range(h)]).astype(np.int32),
        (2.0 ** rng.integers(-2, 3, (h, ng))).astype(F32),
    )


@dataclass
class AttentionCase:
    """A layer with `batch` slots of `lengths` tokens."""

    layout: KVLayout
    query_heads: int
    rng: np.random.Generator
    batch: int = 1
    softcap: float = 0.0
    sink_logits: bool = False
    calibration: Calibration = field(init=False)
    lengths: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.calibration = random_calibration(self.layout, self.rng)
        self.lengths = np.zeros(self.batch, np.int32)
        self.sinks = self.rng.standard_normal(self.query_heads).astype(F32)

    @property
    def attributes(self) -> dict:
        kv, sinks = self.layout, int(self.sink_logits)
        return dict(
            scale=kv.k_dim**-0.5, window=kv.window, softcap=self.softcap, has_sink_logits=sinks,
            format=kv.format, promoted=kv.promoted, sink_tokens=kv.sink_tokens, layer=3,
            recent_tokens=kv.recent_tokens, rollback_tokens=kv.rollback_tokens,
        )  # fmt: skip

    def state(self) -> KVState:
        """A state full of garbage: nothing behind a slot's length may be read."""
        state = KVState.empty(self.layout, self.batch)
        state.blocks[:] = self.rng.integers(-128, 128, state.blocks.shape)
        state.ring[:] = np.nan
        return state

    def tokens(self, rows: int, count: int) -> dict[str, np.ndarray]:
        """Random q, k, v `[rows, count, ...]`, K around the calibrated mean."""
        kv, rng = self.layout, self.rng
        mean = np.zeros_like(self.calibration.k_mean)
        np.put_along_axis(mean, self.calibration.k_order.astype(np.int64), self.calibration.k_mean, -1)
        q = rng.standard_normal((rows, count, self.query_heads, kv.k_dim))
        k = rng.standard_normal((rows, count, kv.num_kv_heads, kv.k_dim)) + mean
        v = rng.standard_normal((rows, count, kv.num_kv_heads, kv.v_dim))
        return {"q": q.astype(F32), "k": k.astype(F32), "v": v.astype(F32)}

    def inputs(self, tokens: dict, state: KVState, slots: list[int], counts: list[int]) -> dict:
        """All inputs of the operator, in its names."""
        c = self.calibration
        return dict(
            **tokens, blocks=state.blocks, ring=state.ring, slot_ids=np.array(slots, np.int32),
            lengths=self.lengths.copy(), num_tokens=np.array(counts, np.int32), k_mean=c.k_mean,
            k_ref=c.k_ref, k_order=c.k_order, v_ref=c.v_ref, sink_logits=self.sinks,
        )  # fmt: skip

    def advance(self, slots: list[int], counts: list[int]) -> None:
        for slot, count in zip(slots, counts, strict=True):
            self.lengths[slot] += count


def close(actual: np.ndarray, expected: np.ndarray, tolerance: float, least: float = 1e-30) -> None:
    """Asserts max |difference| <= tolerance * max |expected|, or `least` where that is larger."""
    assert np.isfinite(actual).all()
    error = np.abs(actual.astype(np.float64) - expected).max() / max(np.abs(expected).max(), least)
    assert error <= tolerance, f"relative error {error:.2e} > {tolerance:.0e}"
