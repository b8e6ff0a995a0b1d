"""Random AsymKVAttention calls on poisoned caches, with the NumPy reference's answer."""

from dataclasses import dataclass, field, replace

import ml_dtypes
import numpy as np

from moec.reference.attention import asym_kv_attention
from moec.reference.kv_cache import Calibration, KVLayout, KVState, prepare_rows
from tests.helpers.kernels import DTYPES, run_attention

F32 = np.float32


@dataclass
class Case:
    """An attention layer: geometry, attributes, and the slots' tokens so far."""

    layout: KVLayout
    num_heads: int
    lengths: list[int]
    dtype: str = "fp16"
    softcap: float = 0.0
    sinks: bool = False
    tensors: dict = field(default_factory=dict)

    @property
    def attrs(self) -> dict:
        kv = self.layout
        return {
            "scale": float(F32(kv.k_dim**-0.5)),
            "window": kv.window,
            "softcap": self.softcap,
            "has_sink_logits": int(self.sinks),
            "format": kv.format,
            "promoted": kv.promoted,
            "sink_tokens": kv.sink_tokens,
            "recent_tokens": kv.recent_tokens,
            "rollback_tokens": kv.rollback_tokens,
        }

    def numbers(self, rng: np.random.Generator, *shape: int) -> np.ndarray:
        """Normal float32 numbers that the activation type represents exactly."""
        return rng.standard_normal(shape).astype(F32).astype(DTYPES[self.dtype]).astype(F32)


def make_case(
    rng: np.random.Generator, layout: KVLayout, num_heads: int, lengths: list[int], **options
) -> Case:
    """A layer whose slots hold `lengths` random tokens; cache memory that no token owns is NaN or noise."""
    case = Case(layout, num_heads, lengths, **options)
    heads, dk, slots = layout.num_kv_heads, layout.k_dim, len(lengths)
    centred = 0.0 if case.softcap else 1.0
    ring = np.full(layout.ring_shape(slots), np.nan, layout.ring_dtype)
    blocks = rng.integers(-128, 128, layout.blocks_shape(slots), dtype=np.int8)
    case.tensors = {
        "blocks": blocks,
        "ring": ring,
        "k_mean": (centred * rng.standard_normal((heads, dk))).astype(F32),
        "k_ref": (2.0 ** rng.integers(-2, 3, (heads, dk))).astype(F32),
        "k_order": np.stack([rng.permutation(dk) for _ in range(heads)]).astype(np.int32),
        "v_ref": (2.0 ** rng.integers(-1, 2, (heads, layout.num_v_groups))).astype(F32),
        "sink_logits": rng.standard_normal(num_heads).astype(F32),
        "lengths": np.array(lengths, np.int32),
    }
    fill_slots(rng, case)
    return case


def fill_slots(rng: np.random.Generator, case: Case) -> None:
    """Appends every slot's tokens by the reference, without attending."""
    kv, t = case.layout, case.tensors
    calibration = Calibration(t["k_mean"], t["k_ref"], t["k_order"], t["v_ref"])
    state = KVState(kv, t["blocks"], t["ring"])
    for slot, length in enumerate(case.lengths):
        k = case.numbers(rng, length, kv.num_kv_heads, kv.k_dim)
        v = case.numbers(rng, length, kv.num_kv_heads, kv.v_dim)
        for token, row in enumerate(prepare_rows(kv, k, v, calibration)):
            state.append(slot, token, row)
            state.flush(slot, token, t["v_ref"])


def make_step(
    rng: np.random.Generator, case: Case, slots: list[int], num_tokens: list[int], chunk: int
) -> dict:
    """Inputs of one call: rows for `slots` with `num_tokens` of `chunk` positions; padding is NaN."""
    kv, b = case.layout, len(slots)
    step = {
        "q": case.numbers(rng, b, chunk, case.num_heads, kv.k_dim),
        "k": case.numbers(rng, b, chunk, kv.num_kv_heads, kv.k_dim),
        "v": case.numbers(rng, b, chunk, kv.num_kv_heads, kv.v_dim),
        "slot_ids": np.array(slots, np.int32),
        "num_tokens": np.array(num_tokens, np.int32),
    }
    for row, count in enumerate(num_tokens):
        for name in "qkv":
            step[name][row, count:] = np.nan
    return step


def run_reference(case: Case, step: dict) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """out, blocks, ring by moec.reference; the case is not changed."""
    with np.errstate(invalid="ignore"):
        return asym_kv_attention(**step, **case.tensors, **case.attrs)


def run_kernel(lib, case: Case, step: dict, schedule: int = 0, seed: int = 1) -> tuple[np.ndarray, dict]:
    """out (in the activation type) and the tensors with updated blocks and ring; the case is not changed."""
    dtype = DTYPES[case.dtype]
    tensors = {name: value.copy() for name, value in case.tensors.items()}
    inputs = {name: step[name].astype(dtype) for name in "qkv"}
    out = run_attention(lib, {**step, **tensors, **inputs}, case.attrs, case.dtype, schedule, seed)
    return out, tensors


def advance(case: Case, step: dict, tensors: dict) -> Case:
    """The case after a step whose new state is in `tensors`."""
    lengths = case.tensors["lengths"].copy()
    lengths[step["slot_ids"]] += step["num_tokens"]
    return replace(case, lengths=lengths.tolist(), tensors={**tensors, "lengths": lengths})


def raw(x: np.ndarray) -> np.ndarray:
    """The bits, so that NaN and the sign of zero count."""
    return x.view(np.uint16) if x.itemsize == 2 else x.view(np.uint8)


def assert_close(out: np.ndarray, expected: np.ndarray) -> None:
    """Equal up to the rounding of the activation type and 1e-4 of the largest value."""
    rounding = float(ml_dtypes.finfo(out.dtype).eps)
    largest = float(np.abs(expected).max(initial=1e-6))
    np.testing.assert_allclose(out.astype(F32), expected, rtol=rounding, atol=1e-4 * largest)


def check_step(lib, case: Case, step: dict, schedule: int = 0, seed: int = 1) -> Case:
    """Runs a step both ways: state bit for bit, output within tolerance. Returns the advanced case."""
    expected, blocks, ring = run_reference(case, step)
    out, tensors = run_kernel(lib, case, step, schedule, seed)
    np.testing.assert_array_equal(raw(tensors["ring"]), raw(ring))
    np.testing.assert_array_equal(tensors["blocks"], blocks)
    assert_close(out, expected)
    return advance(case, step, tensors)
