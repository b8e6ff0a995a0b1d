"""A small language for writing ONNX function bodies: values with operators that append nodes."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

OPSET = 24
F32, F16, I64, I32, U8, I8, BOOL = (
    np.dtype(t) for t in (np.float32, np.float16, np.int64, np.int32, np.uint8, np.int8, np.bool_)
)
Operand = "Value | float | int"


class Value:
    """A tensor inside a body: its name and element type; Python numbers become constants of that type."""

    def __init__(self, body: Body, name: str, dtype: np.dtype) -> None:
        self.body, self.name, self.dtype = body, name, np.dtype(dtype)

    def _binary(self, op: str, other: Operand, dtype: np.dtype | None = None, **attributes: Any) -> Value:
        right = other if isinstance(other, Value) else self.body.constant(other, self.dtype)
        return self.body.op(op, self, right, dtype=dtype or self.dtype, **attributes)

    def __add__(self, other: Operand) -> Value:
        return self._binary("Add", other)

    def __sub__(self, other: Operand) -> Value:
        return self._binary("Sub", other)

    def __mul__(self, other: Operand) -> Value:
        return self._binary("Mul", other)

    def __truediv__(self, other: Operand) -> Value:
        return self._binary("Div", other)

    def __floordiv__(self, other: Operand) -> Value:
        """Integers that are not negative only: ONNX truncates."""
        return self._binary("Div", other)

    def __mod__(self, other: Operand) -> Value:
        return self._binary("Mod", other)

    def __matmul__(self, other: Value) -> Value:
        return self._binary("MatMul", other)

    def __lt__(self, other: Operand) -> Value:
        return self._binary("Less", other, BOOL)

    def __le__(self, other: Operand) -> Value:
        return self._binary("LessOrEqual", other, BOOL)

    def __gt__(self, other: Operand) -> Value:
        return self._binary("Greater", other, BOOL)

    def __ge__(self, other: Operand) -> Value:
        return self._binary("GreaterOrEqual", other, BOOL)

    def equal(self, other: Operand) -> Value:
        return self._binary("Equal", other, BOOL)

    def __and__(self, other: Operand) -> Value:
        return self._binary("And" if self.dtype == BOOL else "BitwiseAnd", other)

    def __or__(self, other: Operand) -> Value:
        return self._binary("Or" if self.dtype == BOOL else "BitwiseOr", other)

    def __rshift__(self, other: Operand) -> Value:
        return self._binary("BitShift", other, direction="RIGHT")

    def __lshift__(self, other: Operand) -> Value:
        return self._binary("BitShift", other, direction="LEFT")

    def minimum(self, other: Operand) -> Value:
        return self._binary("Min", other)

    def maximum(self, other: Operand) -> Value:
        return self._binary("Max", other)

    def clip(self, low: float, high: float) -> Value:
        return self.maximum(low).minimum(high)

    def unary(self, op: str, **attributes: Any) -> Value:
        return self.body.op(op, self, **attributes)

    def cast(self, dtype: np.dtype) -> Value:
        if self.dtype == dtype:
            return self
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        return self.body.op("Cast", self, dtype=dtype, to=kind)

    def reshape(self, *shape: int | Value) -> Value:
        """0 keeps a dimension, -1 infers one; one-element int64 values may stand for dimensions."""
        return self.body.op("Reshape", self, self.body.dims(*shape))

    def expand(self, *shape: int | Value) -> Value:
        return self.body.op("Expand", self, self.body.dims(*shape))

    def transpose(self, *order: int) -> Value:
        return self.unary("Transpose", perm=list(order))

    def unsqueeze(self, *axes: int) -> Value:
        return self.body.op("Unsqueeze", self, self.body.ints(*axes))

    def size(self, axis: int) -> Value:
        """One dimension as int64 `[1]`."""
        return self.body.op("Shape", self, dtype=I64, start=axis, end=axis + 1)

    def slice(self, start: int, end: int | Value, axis: int) -> Value:
        stop = end if isinstance(end, Value) else self.body.ints(end)
        return self.body.op("Slice", self, self.body.ints(start), stop, self.body.ints(axis))

    def split(self, axis: int, parts: int) -> list[Value]:
        """Equal parts along an axis."""
        return self.body.op("Split", self, outputs=parts, axis=axis, num_outputs=parts)

    def gather(self, indices: Value, axis: int = 0) -> Value:
        return self.body.op("Gather", self, indices, axis=axis)

    def gather_rows(self, indices: Value) -> Value:
        """self `[b, n, ...]`, indices int64 `[b, m]` -> `[b, m, ...]`."""
        return self.body.op("GatherND", self, indices.unsqueeze(2), batch_dims=1)

    def gather_elements(self, indices: Value, axis: int) -> Value:
        return self.body.op("GatherElements", self, indices, axis=axis)

    def reduce(self, op: str, axis: int, keepdims: int = 1) -> Value:
        return self.body.op(op, self, self.body.ints(axis), keepdims=keepdims)

    def argmax(self, axis: int) -> Value:
        return self.body.op("ArgMax", self, dtype=I64, axis=axis, keepdims=0)


class Body:
    """Nodes of a function in the making."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self._constants: dict[tuple, Value] = {}
        self._count = 0

    def input(self, name: str, dtype: np.dtype) -> Value:
        return Value(self, name, dtype)

    def _fresh(self, count: int) -> list[str]:
        self._count += 1
        return [f"v{self._count}_{i}" for i in range(count)]

    def op(
        self, kind: str, *inputs: Value, outputs: int = 1, dtype: np.dtype | None = None, **attrs: Any
    ) -> Any:
        """Appends a node; returns its value, or a list where `outputs` > 1."""
        names = self._fresh(outputs)
        self.nodes.append(helper.make_node(kind, [value.name for value in inputs], names, **attrs))
        values = [Value(self, name, inputs[0].dtype if dtype is None else dtype) for name in names]
        return values[0] if outputs == 1 else values

    def constant(self, value: Any, dtype: np.dtype) -> Value:
        """A constant tensor; equal ones share a node."""
        array = np.asarray(value, dtype)
        key = (array.dtype.str, array.shape, array.tobytes())
        if key not in self._constants:
            name = self._fresh(1)[0]
            self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
            self._constants[key] = Value(self, name, array.dtype)
        return self._constants[key]

    def ints(self, *values: int) -> Value:
        """int64 `[n]`."""
        return self.constant(values, I64)

    def dims(self, *shape: int | Value) -> Value:
        """A shape: numbers and one-element int64 values."""
        if all(isinstance(dim, int) for dim in shape):
            return self.ints(*shape)
        return self.concat([dim if isinstance(dim, Value) else self.ints(dim) for dim in shape], 0)

    def arange(self, count: Value) -> Value:
        """int64 `[count]` of a one-element count."""
        scalar = self.op("Squeeze", count)
        return self.op("Range", self.constant(0, I64), scalar, self.constant(1, I64), dtype=I64)

    def concat(self, values: Sequence[Value], axis: int) -> Value:
        return self.op("Concat", *values, axis=axis)

    def where(self, condition: Value, yes: Operand, no: Operand) -> Value:
        dtype = yes.dtype if isinstance(yes, Value) else no.dtype
        yes, no = (v if isinstance(v, Value) else self.constant(v, dtype) for v in (yes, no))
        return self.op("Where", condition, yes, no, dtype=dtype)

    def result(self, name: str, value: Value) -> None:
        """Names an output of the function."""
        self.nodes.append(helper.make_node("Identity", [value.name], [name]))
