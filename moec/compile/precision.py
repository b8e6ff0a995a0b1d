"""Turns a graph of float32 activations into one of fp16 or bf16 activations, for strongly typed TensorRT.

A value is an activation if it depends on a weight; positions and rotary angles do not, and stay float32 (an
angle in fp16 is wrong from position 2048 on), as do the recurrences of linear attention (Scan). A node with
an activation among its inputs computes in the activation type, and its other float inputs are cast;
reductions and powers of activations, which overflow fp16, and products with a float32 matrix (routers)
compute in float32 until they meet an activation again.
"""

from __future__ import annotations

import onnx_ir as ir

from moec.errors import MoecError

_FLOAT32_OPS = frozenset({
    "Pow", "Exp", "Log", "Softmax", "LogSoftmax", "Reciprocal", "Sqrt", "ReduceMean", "ReduceSum", "ReduceL2",
    "ReduceSumSquare", "ReduceLogSumExp", "CumSum", "Scan",
})  # fmt: skip
_A, _F = "activation", "float"
_OTHER = None
MOEC_INPUTS: dict[str, tuple[str | None, ...]] = {
    "AsymKVAttention": (_A, _A, _A, *(_OTHER,) * 5, _F, _F, _OTHER, _F, _F),
    "PipelinedMoE": (_A, _OTHER, _F, _F, _F, _F, *(_OTHER,) * 3),
    "Experts": (_A, _OTHER, _OTHER, _F, *(_OTHER,) * 3),
    "QuantizedLinear": (_A, _OTHER, _OTHER),
    "AddRMSNorm": (_A, _A, _A),
}
"""Float inputs of the moec ops: of the activation type, or FLOAT whatever the activations are."""


class ActivationType:
    """One pass over a graph, in order; see the module's text.

    Args:
        graph: Changed in place. Its nodes are sorted, its inputs have types.
        dtype: FLOAT16 or BFLOAT16.
    """

    def __init__(self, graph: ir.Graph, dtype: ir.DataType) -> None:
        self.graph, self.dtype = graph, dtype
        self._casts: dict[tuple[int, ir.DataType], ir.Value] = {}

    def run(self) -> None:
        for node in list(self.graph):
            self._visit(node)
        for index, output in enumerate(list(self.graph.outputs)):
            if output.dtype == self.dtype and not output.name.startswith("kv."):
                self._float_output(index, output)

    def _visit(self, node: ir.Node) -> None:
        if node.domain == "moec":
            self._moec(node)
        elif node.op_type == "Cast":
            self._cast_node(node)
        elif any(value is not None and value.dtype == self.dtype for value in node.inputs):
            self._standard(node)
        else:
            _infer(node)

    def _moec(self, node: ir.Node) -> None:
        if node.op_type not in MOEC_INPUTS:
            raise MoecError(f"there is no TensorRT plugin for moec::{node.op_type}", where=node.name)
        for index, kind in enumerate(MOEC_INPUTS[node.op_type]):
            if kind is not None:
                self._want(node, index, self.dtype if kind == _A else ir.DataType.FLOAT)
        for output in node.outputs:
            if output.dtype in (None, ir.DataType.FLOAT):  # the others are caches
                output.type = ir.TensorType(self.dtype)

    def _cast_node(self, node: ir.Node) -> None:
        source, target = node.inputs[0].dtype, ir.DataType(node.attributes["to"].as_int())
        if source == self.dtype and target == ir.DataType.FLOAT:
            target = self.dtype
            node.attributes["to"] = ir.AttrInt64("to", int(target))
        node.outputs[0].type = ir.TensorType(target)

    def _standard(self, node: ir.Node) -> None:
        exact = node.op_type == "MatMul" and node.inputs[1].dtype == ir.DataType.FLOAT
        exact = exact or node.op_type in _FLOAT32_OPS or _writes_state(node)
        inside = ir.DataType.FLOAT if exact else self.dtype
        for index, value in enumerate(node.inputs):
            if value is not None and value.dtype in (self.dtype, ir.DataType.FLOAT):
                self._want(node, index, inside)
        _infer(node)

    def _want(self, node: ir.Node, index: int, dtype: ir.DataType) -> None:
        value = node.inputs[index]
        if value.dtype == dtype:
            return
        key = (id(value), dtype)
        if key not in self._casts:
            self._casts[key] = self._cast(node, value, dtype)
        node.replace_input_with(index, self._casts[key])

    def _cast(self, before: ir.Node, value: ir.Value, dtype: ir.DataType) -> ir.Value:
        name = f"{value.name}.as_{dtype.name.lower()}"
        cast = ir.node("Cast", [value], attributes={"to": dtype}, name=name)
        cast.outputs[0].name, cast.outputs[0].type, cast.outputs[0].shape = (
            name,
            ir.TensorType(dtype),
            value.shape,
        )
        self.graph.insert_before(before, cast)
        return cast.outputs[0]

    def _float_output(self, index: int, output: ir.Value) -> None:
        name, output.name = output.name, f"{output.name}.{self.dtype.name.lower()}"
        cast = ir.node("Cast", [output], attributes={"to": ir.DataType.FLOAT}, name=f"{name}.cast")
        result = cast.outputs[0]
        result.name, result.type, result.shape = name, ir.TensorType(ir.DataType.FLOAT), output.shape
        self.graph.append(cast)
        self.graph.outputs[index] = result


def _writes_state(node: ir.Node) -> bool:
    """The states of recurrent layers are kept in float32."""
    return node.op_type == "ScatterND" and (node.inputs[0].name or "").startswith("state.")


_INT64, _BOOL = ir.DataType.INT64, ir.DataType.BOOL
_FIXED = {
    **dict.fromkeys(("Shape", "Size", "NonZero", "ArgMax", "ArgMin"), _INT64),
    **dict.fromkeys(("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", "And", "Or", "Not"), _BOOL),
    **dict.fromkeys(("IsNaN", "IsInf"), _BOOL),
}


def _infer(node: ir.Node) -> None:
    """Types of a standard node's outputs from its inputs'."""
    if node.op_type in _FIXED:
        types = [_FIXED[node.op_type]] * len(node.outputs)
    elif node.op_type in ("Constant", "ConstantOfShape"):
        types = [node.outputs[0].dtype or _constant_type(node)]
    elif node.op_type == "TopK":
        types = [node.inputs[0].dtype, _INT64]
    else:
        data = node.inputs[1 if node.op_type == "Where" else 0]
        types = [data.dtype] * len(node.outputs)
    for value, dtype in zip(node.outputs, types, strict=True):
        if dtype is not None:
            value.type = ir.TensorType(dtype)


def _constant_type(node: ir.Node) -> ir.DataType:
    for attribute in node.attributes.values():
        if attribute.type == ir.AttributeType.TENSOR:
            return attribute.as_tensor().dtype
        if attribute.type in (ir.AttributeType.INT, ir.AttributeType.INTS):
            return _INT64
    return ir.DataType.FLOAT
