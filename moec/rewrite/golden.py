"""Graphs as stable text: one line a node, reviewed like source (`graphs/`)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

_INLINE = 16  # constants up to this many elements are printed where they are used


def graph_text(model: ir.Model) -> str:
    """Inputs, outputs, parameters and nodes with shapes and attributes.

    Nodes come in the order in which the outputs need them, and values without a telling name are numbered in
    it, so that two captures of one model give the same text: transformers keeps RoPE types in a set.
    """
    names = _Names(model.graph)
    lines = [f"opset {dict(sorted(model.graph.opset_imports.items()))}", "inputs"]
    lines += [f"  {names[v]}: {_type(v)}" for v in model.graph.inputs]
    lines += ["outputs", *(f"  {names[v]}: {_type(v)}" for v in model.graph.outputs), "parameters"]
    shared = sorted((v for v in model.graph.initializers.values() if not _inline(v)), key=lambda v: v.name)
    lines += [f"  {names[v]}: {_type(v)}" for v in shared]
    return "\n".join([*lines, "nodes", *(f"  {line}" for line in _nodes(model.graph, names))]) + "\n"


class _Names:
    def __init__(self, graph: ir.Graph) -> None:
        self.known: dict[ir.Value, str] = {v: v.name for v in (*graph.inputs, *graph.outputs)}
        self.known |= {v: v.name for v in graph.initializers.values()}

    def __getitem__(self, value: ir.Value | None) -> str:
        if value is None:
            return "_"
        if _inline(value):
            return _constant(value)
        if value not in self.known:
            kept = "." in (value.name or "")
            self.known[value] = value.name if kept else f"%{sum(n[0] == '%' for n in self.known.values())}"
        return self.known[value]


def _inline(value: ir.Value) -> bool:
    return value.const_value is not None and value.const_value.size <= _INLINE


def _constant(value: ir.Value) -> str:
    array = value.const_value.numpy()
    return np.array2string(array, separator=",", max_line_width=10**6, precision=6).replace(" ", "")


def _type(value: ir.Value) -> str:
    shape = "?" if value.shape is None else ",".join("?" if _unknown(d) else str(d) for d in value.shape)
    return f"{value.dtype.short_name() if value.dtype else '?'}[{shape}]"


def _unknown(dim: int | ir.SymbolicDim) -> bool:
    return not isinstance(dim, int) and dim.value is None


def _nodes(graph: ir.Graph, names: _Names) -> Iterator[str]:
    for node in _in_order_of_need(graph):
        kind = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
        inputs = ", ".join(names[v] for v in node.inputs)
        outputs = ", ".join(f"{names[o]}: {_type(o)}" for o in node.outputs if _used(o))
        attributes = ", ".join(f"{k}={_value(a)}" for k, a in sorted(node.attributes.items()))
        yield f"{outputs} = {kind}({inputs})" + (f" {{{attributes}}}" if attributes else "")


def _in_order_of_need(graph: ir.Graph) -> Iterator[ir.Node]:
    """Depth first from the outputs, inputs in their order; nodes that nothing needs are left out."""
    done: set[ir.Node] = set()
    stack = [value.producer() for value in reversed(graph.outputs)]
    while stack:
        node = stack[-1]
        missing = [] if node is None or node in done else _producers(node) - done
        if missing:
            stack += [p for v in reversed(node.inputs) if v is not None and (p := v.producer()) in missing]
            continue
        stack.pop()
        if node is not None and node not in done:
            done.add(node)
            yield node


def _producers(node: ir.Node) -> set[ir.Node]:
    return {p for v in node.inputs if v is not None and (p := v.producer()) is not None}


def _used(value: ir.Value) -> bool:
    return bool(value.uses()) or value.is_graph_output()


def _value(attribute: ir.Attr) -> str:
    value = attribute.value
    if isinstance(value, float):
        return f"{value:.6g}"
    if attribute.type == ir.AttributeType.GRAPH:
        return _body(value)
    if attribute.type == ir.AttributeType.TENSOR:
        return np.array2string(value.numpy(), separator=",", threshold=16, precision=6).replace(" ", "")
    return str(list(value) if isinstance(value, tuple) else value)


def _body(graph: ir.Graph) -> str:
    """A subgraph in one line."""
    names = _Names(graph)
    nodes = "; ".join(f"{names[n.outputs[0]]} = {n.op_type}({_names(n, names)})" for n in graph)
    inputs, outputs = (", ".join(names[v] for v in values) for values in (graph.inputs, graph.outputs))
    return f"({inputs}) -> ({outputs}): {nodes}"


def _names(node: ir.Node, names: _Names) -> str:
    return ", ".join(names[v] for v in node.inputs)
