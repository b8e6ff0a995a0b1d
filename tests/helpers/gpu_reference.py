"""What a GPU engine is compared with: the CPU backend on the same bundle, playing the same steps."""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import onnx

from moec.bundle.reader import open_bundle
from moec.runtime.backends.cpu import CpuBackend
from moec.runtime.backends.cpu_bundle import GRAPH, open_cpu_backend

# Results that an engine keeps in fp16.
_ROUNDED = ("MatMul", "MatMulNBits", "AsymKVAttention", "PipelinedMoE", "Experts", "Add", "Mul", "Sigmoid")


@dataclass(frozen=True)
class Step:
    """One call of a backend's `step`."""

    input_ids: np.ndarray
    slot_ids: tuple[int, ...]
    num_tokens: tuple[int, ...]


class Steps(Protocol):
    """What plays a script: CpuBackend or GpuEngine."""

    def step(
        self, input_ids: np.ndarray, slot_ids: Sequence[int], num_tokens: Sequence[int]
    ) -> np.ndarray: ...


def script(
    rng: np.random.Generator, vocab: int, prompts: Sequence[int], decodes: int, chunk: int
) -> list[Step]:
    """Prefills a slot for every prompt length in chunks, then decodes all; every third decode idles a row."""
    steps = []
    for slot, length in enumerate(prompts):
        for start in range(0, length, chunk):
            count = min(chunk, length - start)
            ids = np.zeros((1, chunk), np.int32)
            ids[0, :count] = rng.integers(vocab, size=count)
            steps.append(Step(ids, (slot,), (count,)))
    slots = tuple(range(len(prompts)))
    for i in range(decodes):
        counts = tuple(int(i % 3 != 2 or slot != i % len(slots)) for slot in slots)
        steps.append(Step(rng.integers(vocab, size=(len(slots), 1)).astype(np.int32), slots, counts))
    return steps


def play(steps: Sequence[Step], backend: Steps, **options: Any) -> np.ndarray:
    """float32 `[rows with tokens, V]`: the logits of a script, idle rows left out."""
    logits = [backend.step(s.input_ids, s.slot_ids, s.num_tokens, **options) for s in steps]
    busy = [np.array(step.num_tokens) > 0 for step in steps]
    return np.concatenate([rows[mask] for rows, mask in zip(logits, busy, strict=True)])


def relative_errors(got: np.ndarray, want: np.ndarray) -> np.ndarray:
    """`[rows]`: length of the difference over the length of the centred logits."""
    centred = want - want.mean(axis=1, keepdims=True)
    return np.linalg.norm(got - want, axis=1) / np.linalg.norm(centred, axis=1)


def exact_backend(folder: Path, scratch: Path, half: bool = False) -> CpuBackend:
    """The CPU backend on a bundle, with float32 instead of int8 activations in its products.

    Args:
        folder: The bundle, a small one: its files are copied, as ONNX Runtime follows no links.
        scratch: An empty folder.
        half: Also round every result to fp16 and back: what an engine's activations lose.
    """
    for path in folder.iterdir():
        if path.is_file() and path.suffix != ".plan":
            shutil.copy(path, scratch)
    model = onnx.load(folder / GRAPH, load_external_data=False)
    for node in model.graph.node:
        _make_exact(node)
    if half:
        _round_results(model.graph)
    (scratch / GRAPH).write_bytes(model.SerializeToString())
    return open_cpu_backend(open_bundle(scratch, verify=False), threads=1)


def _make_exact(node: onnx.NodeProto) -> None:
    for attribute in node.attribute:
        if attribute.name == "accuracy_level":
            attribute.i = 0
        if attribute.name == "compute":
            attribute.s = b"fp32"


def _round_results(graph: onnx.GraphProto) -> None:
    """Casts to fp16 and back after every node but the last of those operators."""
    nodes = []
    single = onnx.TensorProto.FLOAT
    known = {value.name for value in graph.value_info if value.type.tensor_type.elem_type == single}
    for node in graph.node:
        nodes.append(node)
        if node.op_type in _ROUNDED and node.output[0] in known:
            nodes += _casts(node)
    del graph.node[:]
    graph.node.extend(nodes)


def _casts(node: onnx.NodeProto) -> Iterator[onnx.NodeProto]:
    name = node.output[0]
    node.output[0] = f"{name}.whole"
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    yield onnx.helper.make_node("Cast", [f"{name}.whole"], [f"{name}.half"], to=half)
    yield onnx.helper.make_node("Cast", [f"{name}.half"], [name], to=single)
