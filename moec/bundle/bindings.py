"""The binding table of a graph: what each of its inputs and outputs is, and where it comes from."""

from __future__ import annotations

import re

import onnx_ir as ir

from moec.bundle.manifest import Binding
from moec.errors import MoecError

_INPUTS = (
    (r"input_ids|slot_ids|lengths|num_tokens", "request"),
    (r"kv\.\d+\.(blocks|ring)", "cache"),
    (r"state\.\d+\.\w+", "cache"),
    (r"kv\.\d+\.(k_mean|k_ref|k_order|v_ref)", "calibration"),
    (r"moe\.\d+\.experts", "store"),
)


def bindings_of(graph: ir.Graph) -> tuple[tuple[Binding, ...], tuple[Binding, ...]]:
    """Inputs and outputs of a bundle's graph, in the graph's order.

    Raises:
        MoecError: an input or output that the graph contract does not have, or one without type or shape.
    """
    inputs = tuple(_binding(v, _source(v.name)) for v in graph.inputs)
    names = {binding.name for binding in inputs}
    return inputs, tuple(_output(v, names) for v in graph.outputs)


def _source(name: str) -> str:
    for pattern, source in _INPUTS:
        if re.fullmatch(pattern, name):
            return source
    raise MoecError(f"The graph has an input that no bundle can give: {name}")


def _output(value: ir.Value, inputs: set[str]) -> Binding:
    if value.name == "logits":
        return _binding(value, "result")
    state = value.name.removesuffix(".out")
    if not value.name.endswith(".out") or state not in inputs:
        raise MoecError(f"The graph has an output that no bundle can take: {value.name}")
    return _binding(value, "cache", state)


def _binding(value: ir.Value, source: str, alias_of: str | None = None) -> Binding:
    if value.dtype is None or value.shape is None:
        raise MoecError(f"{value.name} has no type or shape in the graph")
    shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    return Binding(value.name, value.dtype.numpy().name, shape, source, alias_of)
