"""A graph in fp16 or bf16 -> the same in float32, which is what the rules know.

The CPU backend computes in float32, and compile/precision.py chooses the types of an engine anew. Half
precision stays in constants that the exporter rounded: the rules compare them with the geometry's up to
`RewriteContext.tolerance`.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import onnx_ir as ir

from moec.rewrite.context import RewriteContext

_SIGNIFICANT_BITS = {ir.DataType.FLOAT16: 11, ir.DataType.BFLOAT16: 8}


def half_type(graph: ir.Graph) -> ir.DataType | None:
    """The half-precision type of a captured graph's parameters, None in float32 graphs."""
    types = {v.dtype for v in graph.initializers.values() if v.const_value is None}
    return min(types & _SIGNIFICANT_BITS.keys(), key=_SIGNIFICANT_BITS.get, default=None)


def widen(model: ir.Model, context: RewriteContext, notes: list[str]) -> int:
    """Makes every fp16 and bf16 value float32, and casts between them vanish; returns how many were."""
    dtype = half_type(model.graph)
    if dtype is None:
        return 0
    context.tolerance = max(context.tolerance, 2.0 ** -_SIGNIFICANT_BITS[dtype])
    count = sum(
        _widen_value(value) for graph in (model.graph, *_bodies(model.graph)) for value in _values(graph)
    )
    for graph in (model.graph, *_bodies(model.graph)):
        for node in graph:
            _widen_attributes(node)
            _drop_cast(node)
    return count


def _bodies(graph: ir.Graph) -> Iterator[ir.Graph]:
    for node in graph:
        for attribute in node.attributes.values():
            if attribute.type == ir.AttributeType.GRAPH:
                yield attribute.as_graph()


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    yield from graph.inputs
    yield from graph.initializers.values()
    for node in graph:
        yield from node.outputs


def _widen_value(value: ir.Value) -> bool:
    if value.dtype not in _SIGNIFICANT_BITS:
        return False
    value.type = ir.TensorType(ir.DataType.FLOAT)
    if value.const_value is not None:
        value.const_value = ir.tensor(value.const_value.numpy().astype(np.float32), name=value.name)
    return True


def _widen_attributes(node: ir.Node) -> None:
    """Types that operators are told, and constants inside of them."""
    for name, attribute in list(node.attributes.items()):
        if attribute.type == ir.AttributeType.TENSOR and attribute.as_tensor().dtype in _SIGNIFICANT_BITS:
            node.attributes[name] = ir.AttrTensor(
                name, ir.tensor(attribute.as_tensor().numpy().astype(np.float32))
            )
        elif name in ("to", "dtype") and attribute.as_int() in list(_SIGNIFICANT_BITS):
            node.attributes[name] = ir.AttrInt64(name, int(ir.DataType.FLOAT))


def _drop_cast(node: ir.Node) -> None:
    """A cast from float32 to float32."""
    if node.op_type not in ("Cast", "CastLike") or node.inputs[0].dtype != ir.DataType.FLOAT:
        return
    to = node.attributes["to"].as_int() if node.op_type == "Cast" else node.inputs[1].dtype
    if to == ir.DataType.FLOAT and not node.outputs[0].is_graph_output():
        node.outputs[0].replace_all_uses_with(node.inputs[0])
