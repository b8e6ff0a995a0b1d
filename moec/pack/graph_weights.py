"""Between a lowered graph and `weights.safetensors`: what to pack, and where the graph finds it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import onnx_ir as ir

from moec.errors import MoecError
from moec.pack.weights import TRANSFORMS, TensorPlan, entries_of

WEIGHTS = "weights.safetensors"
_PLAIN = {ir.DataType.BFLOAT16: "bf16", ir.DataType.FLOAT: "f32"}


def plans_for(model: ir.Model, shape_of: Callable[[str], Sequence[int]]) -> list[TensorPlan]:
    """A plan for every initializer without data, in the graph's order.

    `P.codes` and `P.scales` are the parameter P quantized, to the format whose size the codes have; any other
    name is a parameter stored in the initializer's own type.

    Args:
        model: The lowered graph.
        shape_of: Shape of a checkpoint parameter.

    Raises:
        MoecError: an initializer that no parameter can fill.
    """
    names = [v.name for v in _empty(model) if not v.name.endswith(".scales")]
    return [_plan(model.graph.initializers[name], shape_of) for name in names]


def bind_weights(model: ir.Model, places: Mapping[str, tuple[int, int]], location: str = WEIGHTS) -> None:
    """Give every initializer without data its place in the weights file.

    Args:
        model: The lowered graph, changed in place.
        places: Tensor name -> (offset, length) in bytes, from `write_weights`.
        location: Name of the weights file beside the graph.

    Raises:
        MoecError: a tensor that was not packed, or has another size than the graph expects.
    """
    for value in _empty(model):
        offset, length = places.get(value.name, (0, -1))
        if length != _nbytes(value):
            raise MoecError(f"The packed {value.name} has {length} bytes, the graph wants {_nbytes(value)}")
        value.const_value = ir.ExternalTensor(
            location, offset, length, value.dtype, shape=value.shape, name=value.name
        )


def _empty(model: ir.Model) -> list[ir.Value]:
    return [v for v in model.graph.initializers.values() if v.const_value is None]


def _plan(value: ir.Value, shape_of: Callable[[str], Sequence[int]]) -> TensorPlan:
    if not value.name.endswith(".codes"):
        if value.dtype not in _PLAIN:
            raise MoecError(f"{value.name} cannot be stored as {value.dtype}")
        return TensorPlan(value.name, _PLAIN[value.dtype])
    name = value.name.removesuffix(".codes")
    for transform in TRANSFORMS[:2]:
        plan = TensorPlan(name, transform)
        if entries_of(plan, shape_of(name))[0].nbytes == _nbytes(value):
            return plan
    raise MoecError(f"{value.name} of shape {value.shape} is no quantization of {list(shape_of(name))}")


def _nbytes(value: ir.Value) -> int:
    size = value.dtype.itemsize
    for dim in value.shape.numpy():
        size *= dim
    return int(size)
