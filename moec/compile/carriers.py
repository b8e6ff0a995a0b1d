"""Weights as inputs of the engine: which type carries each one, and how the graph reads it.

TensorRT has no packed or unsigned tensors at its border, so codes are carried as INT8, byte by byte as they
lie in weights.safetensors, and read by plugins; nothing is converted at upload but small float parameters:

| in the file                    | engine input                 | read by |
| int4, int8 codes of a matrix   | INT8 `[N, bytes of a row]`   | moec::QuantizedLinear |
| int8 codes of embeddings       | the same                     | Gather, then standard operators |
| their fp16 scales              | FLOAT16 `[N, ceil(K/64)]`    | both |
| bf16 or fp32 parameters        | activation type, or FLOAT    | standard operators, moec operators |

Without the plugin TensorRT-RTX 1.7.1 dequantizes every matrix into a buffer in every step: nine times the
traffic of int4, and 65 to 130 KB of plan for every matrix.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from moec.compile.stored import StoredTensor
from moec.errors import MoecError

GROUP = 64
HALF = ir.DataType.FLOAT16


@dataclass(frozen=True)
class Carrier:
    """One weight input of the engine.

    Attributes:
        input: Name of the engine input.
        tensor: Name of the tensor in weights.safetensors.
        transform: What happens to its bytes at upload: none, or cast (to the input's type).
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
        del self.graph.initializers[parameter.name]
        if f"{parameter.name}.codes" in self.stored:
            self._quantized(parameter)
        else:
            self._float(parameter, ir.DataType.FLOAT if exact else self.activation)

    def _float(self, parameter: ir.Value, dtype: ir.DataType) -> None:
        tensor = self.stored[parameter.name]
        same = {ir.DataType.FLOAT: "F32", HALF: "F16", ir.DataType.BFLOAT16: "BF16"}[dtype]
        parameter.type = ir.TensorType(dtype)
        parameter.const_value = None
        self.graph.inputs.append(parameter)
        transform = "none" if tensor.dtype == same else "cast"
        self.carriers.append(Carrier(parameter.name, tensor.name, transform))

    def _quantized(self, parameter: ir.Value) -> None:
        rows, columns = _matrix_shape(parameter)
        groups = -(-columns // GROUP)
        code_bytes = self.stored[f"{parameter.name}.codes"].nbytes // rows
        bits = {groups * GROUP // 2: 4, groups * GROUP: 8}.get(code_bytes)
        if bits is None:
            raise MoecError("the stored codes do not fit the weight", where=parameter.name)
        codes = self._input(f"{parameter.name}.codes", ir.DataType.INT8, [rows, code_bytes])
        scales = self._input(f"{parameter.name}.scales", HALF, [rows, groups])
        for node in [use.node for use in parameter.uses()]:
            if node.op_type == "Transpose":
                self._products(node, codes, scales, bits)
            elif node.op_type == "Gather" and node.inputs[0] is parameter and bits == 8:
                self._gather(node, codes, scales, columns)
            else:
                raise MoecError(
                    f"{node.op_type} cannot read an int{bits} weight on a GPU", where=parameter.name
                )

    def _input(self, name: str, dtype: ir.DataType, shape: list[int]) -> ir.Value:
        value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
        self.graph.inputs.append(value)
        self.carriers.append(Carrier(name, name, "none"))
        return value

    def _node(
        self,
        op: str,
        inputs: list[ir.Value],
        name: str,
        dtype: ir.DataType,
        domain: str = "",
        **attributes: Any,
    ) -> ir.Value:
        node = ir.node(op, inputs, attributes=attributes or None, domain=domain, name=name)
        node.outputs[0].name = name
        node.outputs[0].type = ir.TensorType(dtype)
        self.graph.append(node)
        return node.outputs[0]

    def _products(self, transpose: ir.Node, codes: ir.Value, scales: ir.Value, bits: int) -> None:
        """MatMul(x, Transpose(weight)) -> QuantizedLinear(x, codes, scales)."""
        for use in list(transpose.outputs[0].uses()):
            product = use.node
            if product.op_type != "MatMul" or use.idx != 1:
                raise MoecError(
                    f"{product.op_type} cannot read an int{bits} weight on a GPU", where=codes.name
                )
            out = product.outputs[0]
            inputs = [product.inputs[0], codes, scales]
            attributes = {"bits": bits, "group_size": GROUP, "version": 1}
            y = self._node("QuantizedLinear", inputs, product.name, self.activation, "moec", **attributes)
            self._take_over(product, y, out)
        self.graph.remove(transpose, safe=True)

    def _take_over(self, old: ir.Node, new: ir.Value, out: ir.Value) -> None:
        new.name, new.shape = out.name, out.shape
        for index, output in enumerate(self.graph.outputs):
            if output is out:
                self.graph.outputs[index] = new
        ir.convenience.replace_all_uses_with(out, new)
        self.graph.remove(old, safe=True)

    def _gather(self, node: ir.Node, codes: ir.Value, scales: ir.Value, columns: int) -> None:
        """Embeddings: pick rows of codes and scales, then decode those: (byte - 128) * scale."""
        ids, name, padded = node.inputs[1], node.outputs[0].name, int(codes.shape[1])
        split, each, whole = (
            self._vector(v) for v in ([-1, padded // GROUP, GROUP], [-1, padded // GROUP, 1], [-1, padded])
        )
        x = self._node("Gather", [codes, ids], f"{name}.codes", ir.DataType.INT8, axis=0)
        scale = self._node("Gather", [scales, ids], f"{name}.scales", HALF, axis=0)
        scale = self._node("Reshape", [scale, each], f"{name}.each", HALF)
        x = self._node("Reshape", [self._centred(x, name), split], f"{name}.split", HALF)
        x = self._node(
            "Reshape", [self._node("Mul", [x, scale], f"{name}.scaled", HALF), whole], f"{name}.whole", HALF
        )
        if columns != padded:
            ends = [self._vector([n]) for n in (0, columns, 1)]
            x = self._node("Slice", [x, *ends], f"{name}.cut", HALF)
        if self.activation != HALF:
            x = self._node("Cast", [x], f"{name}.cast", self.activation, to=self.activation)
        shape = self._node("Shape", [ids], f"{name}.ids_shape", ir.DataType.INT64)
        shape = self._node(
            "Concat", [shape, self._vector([columns])], f"{name}.shape", ir.DataType.INT64, axis=0
        )
        self._take_over(
            node, self._node("Reshape", [x, shape], f"{name}.rows", self.activation), node.outputs[0]
        )

    def _centred(self, x: ir.Value, name: str) -> ir.Value:
        """byte - 128 of a byte that TensorRT reads as signed: exact in fp16."""
        signed = self._node("Cast", [x], f"{name}.signed", HALF, to=HALF)
        zero, down, up = (self._scalar(value) for value in (0, -128, 128))
        negative = self._node("Less", [signed, zero], f"{name}.high", ir.DataType.BOOL)
        offset = self._node("Where", [negative, up, down], f"{name}.offset", HALF)
        return self._node("Add", [signed, offset], f"{name}.centred", HALF)

    def _vector(self, values: list[int]) -> ir.Value:
        return self._constant("moec." + "x".join(map(str, values)), np.array(values, np.int64))

    def _scalar(self, value: int) -> ir.Value:
        return self._constant(f"moec.half.{value}", np.array(value, np.float16))

    def _constant(self, name: str, array: np.ndarray) -> ir.Value:
        """An initializer, shared by name."""
        if name not in self.graph.initializers:
            tensor = ir.tensor(array, name=name)
            kind = ir.TensorType(tensor.dtype)
            value = ir.Value(name=name, type=kind, shape=tensor.shape, const_value=tensor)
            self.graph.register_initializer(value)
        return self.graph.initializers[name]


def _matrix_shape(parameter: ir.Value) -> tuple[int, int]:
    shape = parameter.shape
    if shape is None or len(shape) != 2 or not shape.is_static():
        raise MoecError("only matrices can be quantized", where=parameter.name)
    return int(shape[0]), int(shape[1])
