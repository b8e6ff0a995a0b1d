"""Weights as inputs of the engine: which type carries each one, and how the graph decodes it.

TensorRT has no packed or unsigned tensors at its border, so the bytes of the file are carried as the types
that it has, after one exclusive-or at upload:

| in the file                     | engine input                | at upload   | in the graph |
| int4 codes 0..15, zero point 8  | INT4 `[N, ceil(K/64)*64]`   | bytes ^ 88h | DequantizeLinear by 1, Mul by the scale of each 64 columns |
| int8 codes 0..255, zero 128     | INT8 `[N, ceil(K/64)*64]`   | bytes ^ 80h | Cast, Mul by the scale of each 64 columns |
| their fp16 scales               | FLOAT16 `[N, ceil(K/64)]`   | none        | |
| bf16 or fp32 parameters         | activation type, or FLOAT   | cast        | |

Both exclusive-ors turn "unsigned minus zero point" into two's complement; low nibbles are even columns in the
file and in ONNX's INT4 alike. The product is what a blocked DequantizeLinear computes, bit by bit; TensorRT-RTX
1.7.1 makes one kernel of this form and two of that one (65 KB more of plan a matrix, 35 % more scratch).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from moec.compile.stored import StoredTensor
from moec.errors import MoecError

GROUP = 64


@dataclass(frozen=True)
class Carrier:
    """One weight input of the engine.

    Attributes:
        input: Name of the engine input.
        tensor: Name of the tensor in weights.safetensors.
        transform: What happens to its bytes at upload: none | xor88 | xor80 | cast.
    """

    input: str
    tensor: str
    transform: str


class WeightInputs:
    """Replaces the parameters of a graph by inputs, and remembers where each comes from.

    Args:
        graph: Changed in place, and left unsorted.
        stored: The tensors of weights.safetensors.
        activation: Element type of activations, FLOAT16 or BFLOAT16.
    """

    def __init__(self, graph: ir.Graph, stored: Mapping[str, StoredTensor], activation: ir.DataType) -> None:
        self.graph, self.stored, self.activation = graph, stored, activation
        self.carriers: list[Carrier] = []

    def replace(self, parameter: ir.Value, exact: bool) -> None:
        """Make one initializer an input. `exact`: its consumers want FLOAT (routers, biases, sink logits)."""
        name = parameter.name
        del self.graph.initializers[name]
        if f"{name}.codes" in self.stored:
            self._quantized(parameter)
        else:
            self._float(parameter, ir.DataType.FLOAT if exact else self.activation)

    def _float(self, parameter: ir.Value, dtype: ir.DataType) -> None:
        tensor = self.stored[parameter.name]
        same = {ir.DataType.FLOAT: "F32", ir.DataType.FLOAT16: "F16", ir.DataType.BFLOAT16: "BF16"}[dtype]
        parameter.type = ir.TensorType(dtype)
        parameter.const_value = None
        self.graph.inputs.append(parameter)
        transform = "none" if tensor.dtype == same else "cast"
        self.carriers.append(Carrier(parameter.name, tensor.name, transform))

    def _quantized(self, parameter: ir.Value) -> None:
        rows, columns = self._matrix_shape(parameter)
        groups = -(-columns // GROUP)
        code_bytes = self.stored[f"{parameter.name}.codes"].shape[-1]
        scales = self._input(f"{parameter.name}.scales", ir.DataType.FLOAT16, [rows, groups], "none")
        if code_bytes == groups * GROUP // 2:
            codes = self._input(f"{parameter.name}.codes", ir.DataType.INT4, [rows, groups * GROUP], "xor88")
            self._decode_uses(parameter, codes, scales)
        elif code_bytes == groups * GROUP:
            codes = self._input(f"{parameter.name}.codes", ir.DataType.INT8, [rows, groups * GROUP], "xor80")
            self._gather_uses(parameter, codes, scales)
            self._decode_uses(parameter, codes, scales)
        else:
            raise MoecError("the stored codes do not fit the weight", where=parameter.name)

    def _matrix_shape(self, parameter: ir.Value) -> tuple[int, int]:
        shape = parameter.shape
        if shape is None or len(shape) != 2 or not shape.is_static():
            raise MoecError("only matrices can be quantized", where=parameter.name)
        return int(shape[0]), int(shape[1])

    def _input(self, name: str, dtype: ir.DataType, shape: list[int], transform: str) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        self.carriers.append(Carrier(name, name, transform))
        return value

    def _node(self, op: str, inputs: list[ir.Value], name: str, dtype: ir.DataType, **attrs) -> ir.Value:
        node = ir.node(op, inputs, attributes=attrs or None, name=name)
        node.outputs[0].name = name
        node.outputs[0].type = ir.TensorType(dtype)
        self.graph.append(node)
        return node.outputs[0]

    def constant(self, values: list[int]) -> ir.Value:
        """An int64 vector, shared by value."""
        name = "moec." + "x".join(str(value) for value in values)
        return self._constant(name, np.array(values, np.int64))

    def _constant(self, name: str, array: np.ndarray) -> ir.Value:
        if name not in self.graph.initializers:
            tensor = ir.tensor(array, name=name)
            type_ = ir.TensorType(tensor.dtype)
            self.graph.register_initializer(
                ir.Value(name=name, type=type_, shape=tensor.shape, const_value=tensor)
            )
        return self.graph.initializers[name]

    def _decode_uses(self, parameter: ir.Value, codes: ir.Value, scales: ir.Value) -> None:
        if not parameter.uses():
            return
        name, (rows, columns) = parameter.name, self._matrix_shape(parameter)
        weight = self._finish(name, self._scaled(name, codes, scales, rows), columns, int(codes.shape[1]))
        weight.shape = ir.Shape([rows, columns])
        ir.convenience.replace_all_uses_with(parameter, weight)

    def _finish(self, name: str, x: ir.Value, columns: int, padded: int) -> ir.Value:
        """Cut the padding of the last group, and cast to the activation type."""
        if columns != padded:
            ends = [self.constant([n]) for n in (0, columns, 1)]
            x = self._node("Slice", [x, *ends], f"{name}.cut", x.dtype)
        if x.dtype != self.activation:
            x = self._node("Cast", [x], f"{name}.cast", self.activation, to=self.activation)
        return x

    def _scaled(self, name: str, codes: ir.Value, scales: ir.Value, rows: int) -> ir.Value:
        """codes [rows, K] times scales [rows, K/64] in fp16; `rows` is -1 where unknown."""
        half, columns = ir.DataType.FLOAT16, int(codes.shape[1])
        groups = columns // GROUP
        x = self._half(name, codes)
        x = self._node("Reshape", [x, self.constant([rows, groups, GROUP])], f"{name}.split", half)
        scale = self._node("Reshape", [scales, self.constant([rows, groups, 1])], f"{name}.each", half)
        x = self._node("Mul", [x, scale], f"{name}.scaled", half)
        return self._node("Reshape", [x, self.constant([rows, columns])], f"{name}.dequantized", half)

    def _half(self, name: str, codes: ir.Value) -> ir.Value:
        """Codes as fp16 numbers, exactly. TensorRT casts INT8, but dequantizes INT4 only."""
        half = ir.DataType.FLOAT16
        if codes.dtype == ir.DataType.INT8:
            return self._node("Cast", [codes], f"{name}.half", half, to=half)
        one = self._constant("moec.unit_scale", np.array(1, np.float16))
        return self._node("DequantizeLinear", [codes, one], f"{name}.half", half)

    def _gather_uses(self, parameter: ir.Value, codes: ir.Value, scales: ir.Value) -> None:
        """Embedding look-ups: pick rows of codes and scales, then decode those."""
        for node in [use.node for use in parameter.uses()]:
            if node.op_type == "Gather" and node.inputs[0] is parameter and not _axis(node):
                self._gather(node, codes, scales, self._matrix_shape(parameter)[1])

    def _gather(self, node: ir.Node, codes: ir.Value, scales: ir.Value, columns: int) -> None:
        ids, out, name = node.inputs[1], node.outputs[0], node.outputs[0].name
        picked = self._node("Gather", [codes, ids], f"{name}.codes", codes.dtype, axis=0)
        picked.shape = codes.shape
        scale = self._node("Gather", [scales, ids], f"{name}.scales", scales.dtype, axis=0)
        x = self._finish(name, self._scaled(name, picked, scale, -1), columns, int(codes.shape[1]))
        shape = self._node("Shape", [ids], f"{name}.shape", ir.DataType.INT64)
        shape = self._node(
            "Concat", [shape, self.constant([columns])], f"{name}.full", ir.DataType.INT64, axis=0
        )
        x = self._node("Reshape", [x, shape], f"{name}.rows", self.activation)
        x.shape = out.shape
        ir.convenience.replace_all_uses_with(out, x)
        self.graph.remove(node, safe=True)


def _axis(node: ir.Node) -> int:
    attribute = node.attributes.get("axis")
    return attribute.as_int() if attribute is not None else 0
