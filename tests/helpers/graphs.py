"""Runs captured graphs in stock ONNX Runtime and compares them with transformers, slot by slot."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort
import torch
from transformers import DynamicCache

from moec.bundle.geometry import Geometry


def session(path: str | Path, library: str | Path | None = None) -> ort.InferenceSession:
    """A one-threaded CPU session, with moec's custom operators when `library` is given."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    if library:
        options.register_custom_ops_library(str(library))
    return ort.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


class Stepper:
    """Feeds tokens to slots of a graph and keeps its state (any input `X` with an output `X.out`)."""

    def __init__(self, sess: ort.InferenceSession, constants: Mapping[str, np.ndarray] | None = None) -> None:
        self.sess, self.constants = sess, dict(constants or {})
        outputs = {o.name for o in sess.get_outputs()}
        types = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}
        self.state = {
            i.name: np.zeros(i.shape, types[i.type]) for i in sess.get_inputs() if i.name + ".out" in outputs
        }
        self.names = ["logits", *(f"{n}.out" for n in self.state)]
        lengths = next(i for i in sess.get_inputs() if i.name == "lengths")
        self.lengths = np.zeros(lengths.shape, np.int32)

    def step(self, rows: list[tuple[int, np.ndarray]], width: int | None = None) -> np.ndarray:
        """Appends tokens to slots, a (slot, tokens) pair a row, padded to `width`; returns the logits."""
        width = width or max(len(t) for _, t in rows)
        ids = np.zeros((len(rows), width), np.int32)
        for r, (_, tokens) in enumerate(rows):
            ids[r, : len(tokens)] = tokens
        slots = np.array([s for s, _ in rows], np.int32)
        count = np.array([len(t) for _, t in rows], np.int32)
        feed = dict(input_ids=ids, slot_ids=slots, lengths=self.lengths, num_tokens=count)
        known = {i.name for i in self.sess.get_inputs()}
        feed = {k: v for k, v in {**feed, **self.state, **self.constants}.items() if k in known}
        logits, *state = self.sess.run(self.names, feed)
        self.state = dict(zip(self.state, state, strict=True))
        self.lengths = self.lengths.copy()
        self.lengths[slots] += count
        return logits


def two_slots(stepper: Stepper, a: np.ndarray, b: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Prefills slot 1 with a and slot 0 with b, then decodes both in the other order; logits `[5,V]` each.

    The first row of each result is after the prefill of all but four tokens, then one row for each of the
    four.
    """
    n = 4
    out = stepper.step([(1, a[:-n]), (0, b[:-n])])
    rows_a, rows_b = [out[0]], [out[1]]
    for i in range(n, 0, -1):
        end_a, end_b = len(a) - i, len(b) - i
        out = stepper.step([(0, b[end_b : end_b + 1]), (1, a[end_a : end_a + 1])])
        rows_a.append(out[1]), rows_b.append(out[0])
    return np.stack(rows_a), np.stack(rows_b)


class HalfCache(DynamicCache):
    """transformers' cache with keys and values rounded to fp16."""

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args, **kwargs):
        return super().update(key_states.half().float(), value_states.half().float(), *args, **kwargs)


def reference_logits(
    model: torch.nn.Module, tokens: np.ndarray, last: int = 5, cache: DynamicCache | None = None
) -> np.ndarray:
    """transformers' logits `[last,V]` at the last positions, one pass over the whole text.

    A `cache` must be empty; attention reads keys and values as it keeps them.
    """
    ids = torch.from_numpy(tokens.astype(np.int64))[None]
    with torch.no_grad():
        out = model(input_ids=ids, use_cache=cache is not None, cache=cache)
    return out.logits[0, -last:].numpy()


def half_reference_logits(model: torch.nn.Module, tokens: np.ndarray) -> np.ndarray:
    """The same for the last five positions, with keys and values rounded to fp16."""
    return reference_logits(model, tokens, cache=HalfCache(config=model.config))


def random_texts(seed: int, geometry: Geometry, lengths: tuple[int, int] = (19, 12)) -> list[np.ndarray]:
    """Two random token sequences."""
    rng = np.random.default_rng(seed)
    return [rng.integers(0, geometry.vocab_size, n).astype(np.int32) for n in lengths]
