"""The norms of queries and keys as one: fewer kernels in the plan.

TensorRT-RTX 1.7.1 stores every generated kernel as 135 KB of source, in both profiles. Norms per head over
queries and keys take one reduction kernel each; joined along the heads they take one: 13 MB less for the 48
layers of Qwen3-30B-A3B. The arithmetic is the same: a norm with scale 1, then the product with each scale.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

_VIEWS = ("Reshape", "RotaryEmbedding", "Cast")


def join_norms(graph: ir.Graph) -> int:
    """Joins the norms of every attention layer that has two equal ones; leaves the graph unsorted.

    Returns:
        How many pairs were joined.
    """
    pairs = [pair for node in list(graph) if (pair := _pair(node)) is not None]
    for pair in pairs:
        _join(graph, *pair)
    return len(pairs)


def _pair(node: ir.Node) -> tuple[ir.Node, ir.Node] | None:
    if node.domain != "moec" or node.op_type != "AsymKVAttention":
        return None
    query, key = (_norm(value) for value in node.inputs[:2])
    return (query, key) if query is not None and key is not None and _alike(query, key) else None


def _norm(value: ir.Value | None) -> ir.Node | None:
    """The norm that a query or key comes from, through views and rotation, if nothing else reads it."""
    node = value.producer() if value is not None else None
    while node is not None and node.op_type in _VIEWS and len(node.outputs[0].uses()) == 1:
        node = node.inputs[0].producer()
    found = node is not None and node.op_type == "RMSNormalization" and len(node.outputs[0].uses()) == 1
    return node if found else None


def _alike(query: ir.Node, key: ir.Node) -> bool:
    shapes = [node.inputs[0].shape for node in (query, key)]
    if query is key or any(shape is None or len(shape) != 4 for shape in shapes):
        return False
    heads = [shape[2] for shape in shapes]
    scales = [node.inputs[1].shape for node in (query, key)]
    return (
        all(isinstance(count, int) for count in heads)
        and shapes[0][3] == shapes[1][3]
        and all(scale is not None and len(scale) == 1 for scale in scales)
        and all(_last_axis(node) for node in (query, key))
        and _epsilon(query) == _epsilon(key)
    )


def _last_axis(norm: ir.Node) -> bool:
    axis = norm.attributes.get("axis")
    return axis is None or axis.as_int() in (-1, 3)


def _epsilon(norm: ir.Node) -> float:
    epsilon = norm.attributes.get("epsilon")
    return 1e-5 if epsilon is None else epsilon.as_float()


def _join(graph: ir.Graph, query: ir.Node, key: ir.Node) -> None:
    norms, name = (query, key), query.name or query.outputs[0].name
    shapes = [node.inputs[0].shape for node in norms]
    heads, dim = [int(shape[2]) for shape in shapes], int(shapes[0][3])
    whole = ir.Shape([shapes[0][0], shapes[0][1], sum(heads), dim])
    ones = _constant(graph, f"moec.ones.{dim}", np.ones(dim, np.float32))
    split = _constant(graph, f"moec.heads.{heads[0]}.{heads[1]}", np.array(heads, np.int64))
    both = _add(graph, "Concat", [n.inputs[0] for n in norms], [(f"{name}.joined", whole)], axis=2)
    same = {"axis": -1, "epsilon": _epsilon(query)}
    normed = _add(graph, "RMSNormalization", [*both, ones], [(f"{name}.normed", whole)], **same)
    names = [f"{name}.{part}" for part in ("query", "key")]
    parts = _add(graph, "Split", [*normed, split], list(zip(names, shapes, strict=True)), axis=2)
    for node, part in zip(norms, parts, strict=True):
        out = node.outputs[0]
        (scaled,) = _add(graph, "Mul", [part, node.inputs[1]], [(f"{part.name}.scaled", out.shape)])
        ir.convenience.replace_all_uses_with(out, scaled)
        graph.remove(node, safe=True)


def _constant(graph: ir.Graph, name: str, array: np.ndarray) -> ir.Value:
    if name not in graph.initializers:
        value = ir.Value(name=name, const_value=ir.tensor(array, name=name), shape=ir.Shape(array.shape))
        value.type = ir.TensorType(ir.DataType.from_numpy(array.dtype))
        graph.initializers.add(value)
    return graph.initializers[name]


def _add(
    graph: ir.Graph, op: str, inputs: list[ir.Value], outputs: list[tuple[str, ir.Shape]], **attributes
) -> list[ir.Value]:
    """Append a node; outputs are (name, shape), of the first input's type."""
    node = ir.node(op, inputs, attributes=attributes, num_outputs=len(outputs), name=outputs[0][0])
    for value, (name, shape) in zip(node.outputs, outputs, strict=True):
        value.name, value.shape, value.type = name, shape, inputs[0].type
    graph.append(node)
    return list(node.outputs)
