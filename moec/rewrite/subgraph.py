"""Backward slices of a graph, and running them alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

_VIEWS = ("Reshape", "Identity", "Cast", "Flatten", "Squeeze", "Unsqueeze")


@dataclass
class Slice:
    """Nodes between `inputs` and `outputs`, in graph order; `parameters` are initializers."""

    nodes: list[ir.Node]
    inputs: list[ir.Value]
    outputs: list[ir.Value]
    parameters: list[ir.Value]


def views_of(value: ir.Value) -> list[ir.Value]:
    """The value and what it is a reshape or a cast of."""
    found = [value]
    while (node := found[-1].producer()) is not None and node.op_type in _VIEWS:
        found.append(node.inputs[0])
    return found


def backward_slice(outputs: Iterable[ir.Value], stops: Iterable[ir.Value], limit: int = 256) -> Slice | None:
    """What computes `outputs` from `stops`; None if it needs any other input, or more than `limit` nodes."""
    outputs, stops = list(outputs), set(stops)
    todo, nodes, inputs, parameters = list(outputs), set(), {}, {}
    while todo:
        value = todo.pop()
        node = value.producer()
        if value in stops:
            inputs[value] = None
        elif node is None:
            if not value.is_initializer():
                return None
            parameters[value] = None
        elif node not in nodes:
            nodes.add(node)
            todo += [v for v in node.inputs if v is not None]
            if len(nodes) > limit:
                return None
    graph = next(iter(nodes)).graph if nodes else []
    return Slice([n for n in graph if n in nodes], list(inputs), outputs, list(parameters))


def run_slice(
    part: Slice, feeds: Mapping[str, np.ndarray], parameters: Mapping[str, np.ndarray]
) -> list[np.ndarray]:
    """Runs the slice in stock ONNX Runtime.

    Args:
        part: From `backward_slice`.
        feeds: Input name -> array.
        parameters: Values for parameters without data, by name.
    """
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 3
    proto = ir.to_proto(_model(part, parameters)).SerializeToString()
    session = ort.InferenceSession(proto, options, providers=["CPUExecutionProvider"])
    return session.run(None, dict(feeds))


def _model(part: Slice, parameters: Mapping[str, np.ndarray]) -> ir.Model:
    copies: dict[ir.Value, ir.Value] = {v: _copy(v) for v in part.inputs}
    for v in part.parameters:
        copies[v] = _copy(v)
        copies[v].const_value = v.const_value
        if v.const_value is None:
            copies[v].const_value = ir.tensor(parameters[v.name], name=v.name)
    nodes = [_copy_node(n, copies) for n in part.nodes]
    graph = ir.Graph(
        [copies[v] for v in part.inputs],
        [copies[v] for v in part.outputs],
        nodes=nodes,
        initializers=[copies[v] for v in part.parameters],
        opset_imports={"": 24},
        name="slice",
    )
    return ir.Model(graph, ir_version=10)


def _copy(value: ir.Value) -> ir.Value:
    return ir.Value(name=value.name, type=value.type, shape=value.shape)


def _copy_node(node: ir.Node, copies: dict[ir.Value, ir.Value]) -> ir.Node:
    inputs = [None if v is None else copies[v] for v in node.inputs]
    attributes = list(node.attributes.values())
    new = ir.Node(node.domain, node.op_type, inputs, attributes=attributes, num_outputs=len(node.outputs))
    for old, out in zip(node.outputs, new.outputs, strict=True):
        out.name, out.type, out.shape = old.name, old.type, old.shape
        copies[old] = out
    return new
