"""Model-local functions for every moec node of a graph, so that it runs in stock ONNX Runtime."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator
from typing import Any

import onnx
import onnx_ir as ir
from onnx import helper

from moec.dialect.attention_body import AttentionVariant, attention_body
from moec.dialect.emit import OPSET, Body
from moec.dialect.moe_body import MoEVariant, moe_body
from moec.dialect.operators import DOMAIN, OPS, VERSION, OpDeclaration
from moec.errors import MoecError

MIN_IR_VERSION = 10  # first with overloads of functions

_GENERATORS: dict[str, tuple[Callable, Callable]] = {
    "AsymKVAttention": (AttentionVariant.of_node, attention_body),
    "PipelinedMoE": (MoEVariant.of_node, moe_body),
    "Experts": (MoEVariant.of_node, moe_body),
}


class _Node:
    """A moec node of either kind of model: attributes, static shapes of inputs, overload."""

    def __init__(self, node: Any, attributes: dict[str, Any], shapes: list[tuple | None]) -> None:
        self.node, self.shapes = node, shapes
        self.declaration = OPS.get(node.op_type)
        where = f"node {node.name!r}"
        if self.declaration is None or len(shapes) != len(self.declaration.inputs):
            raise MoecError(f"no operator moec::{node.op_type} with {len(shapes)} inputs", where=where)
        self.attributes = self.declaration.complete(attributes, where)

    def shape(self, name: str) -> tuple:
        """Shape of an input; dimensions that are not static are None.

        Raises:
            MoecError: the graph does not say the shape.
        """
        shape = self.shapes[self.declaration.input_index(name)]
        if shape is None:
            raise MoecError(f"the shape of input {name} is unknown", where=f"node {self.node.name!r}")
        return shape


def _ir_nodes(model: ir.Model) -> Iterator[_Node]:
    for node in model.graph:
        if node.domain == DOMAIN:
            attributes = {name: attribute.value for name, attribute in node.attributes.items()}
            yield _Node(node, attributes, [_ir_shape(value) for value in node.inputs])


def _ir_shape(value: ir.Value | None) -> tuple | None:
    shape = None if value is None else value.shape
    if shape is None and value is not None and value.const_value is not None:
        shape = value.const_value.shape
    return None if shape is None else tuple(dim if isinstance(dim, int) else None for dim in shape)


def _proto_nodes(model: onnx.ModelProto) -> Iterator[_Node]:
    graph = model.graph
    shapes = {tensor.name: tuple(tensor.dims) for tensor in graph.initializer}
    for info in [*graph.input, *graph.value_info, *graph.output]:
        if info.type.tensor_type.HasField("shape"):
            dims = info.type.tensor_type.shape.dim
            shapes[info.name] = tuple(d.dim_value if d.HasField("dim_value") else None for d in dims)
    for node in graph.node:
        if node.domain == DOMAIN:
            attributes = {a.name: helper.get_attribute_value(a) for a in node.attribute}
            yield _Node(node, attributes, [shapes.get(name) for name in node.input])


def _function(declaration: OpDeclaration, overload: str, body: Body) -> onnx.FunctionProto:
    defaults = [
        helper.make_attribute(a.name, a.default) for a in declaration.attributes if a.default is not None
    ]
    return helper.make_function(
        DOMAIN,
        declaration.name,
        [tensor.name for tensor in declaration.inputs],
        [tensor.name for tensor in declaration.outputs],
        body.nodes,
        [helper.make_opsetid("", OPSET)],
        attributes=[a.name for a in declaration.attributes if a.default is None],
        attribute_protos=defaults,
        overload=overload,
    )


def functions_for(model: ir.Model | onnx.ModelProto) -> list[onnx.FunctionProto]:
    """Generates the functions that the model's moec nodes need and points each node at its own by `overload`.

    Layers that differ only in their number share a function. The model itself gets none: see `attach`.

    Raises:
        MoecError: attributes or shapes that no body can be made from (named by node).
    """
    nodes = _ir_nodes(model) if isinstance(model, ir.Model) else _proto_nodes(model)
    functions: dict[tuple[str, str], onnx.FunctionProto] = {}
    for node in nodes:
        describe, generate = _GENERATORS[node.declaration.name]
        variant = describe(node.attributes, node.shape)
        digest = hashlib.sha256(repr(variant).encode()).hexdigest()[:8]
        overload = f"{variant.label}_{digest}"
        node.node.overload = overload
        key = node.declaration.name, overload
        if key not in functions:
            functions[key] = _function(node.declaration, overload, generate(variant))
    return list(functions.values())


def attach(model: ir.Model | onnx.ModelProto) -> ir.Model | onnx.ModelProto:
    """Adds the generated functions to the model in place, for stock ONNX Runtime. Returns the model."""
    functions = functions_for(model)
    if isinstance(model, ir.Model):
        for function in functions:
            converted = ir.serde.deserialize_function(function)
            model.functions[converted.identifier()] = converted
        model.opset_imports.setdefault(DOMAIN, VERSION)
    else:
        model.functions.extend(functions)
        if DOMAIN not in [entry.domain for entry in model.opset_import]:
            model.opset_import.append(helper.make_opsetid(DOMAIN, VERSION))
    model.ir_version = max(model.ir_version, MIN_IR_VERSION)
    return model
