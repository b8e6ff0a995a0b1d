"""Parameters as they lie in weights.safetensors: names, shapes, dtypes, and the cast back to fp32."""

from __future__ import annotations

import onnx_ir as ir

GROUP = 64
TRANSFORM = "moec.transform"  # metadata key on an initializer: int4 | int8 | bf16 | f32

_CODE_BYTES = {"int4": GROUP // 2, "int8": GROUP}


def stored(
    graph: ir.Graph, name: str, dtype: ir.DataType, shape: tuple[int, ...], transform: str
) -> ir.Value:
    """The initializer `name`, without data, of a tensor in weights.safetensors; made once."""
    if name in graph.initializers:
        return graph.initializers[name]
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    value.metadata_props[TRANSFORM] = transform
    graph.initializers.add(value)
    return value


def quantized(weight: ir.Value, transform: str) -> tuple[ir.Value, ir.Value]:
    """Codes u8 `[N, K/64, 32|64]` and fp16 scales `[N, K/64]` of a weight `[N,K]`."""
    n, k = weight.shape
    groups = -(-k // GROUP)
    shape = (n, groups, _CODE_BYTES[transform])
    codes = stored(weight.graph, weight.name + ".codes", ir.DataType.UINT8, shape, transform)
    scales = stored(weight.graph, weight.name + ".scales", ir.DataType.FLOAT16, (n, groups), transform)
    return codes, scales


def as_bf16(weight: ir.Value) -> ir.Value:
    """Declares that a parameter is stored as bf16; all its users see that and must cast."""
    weight.type = ir.TensorType(ir.DataType.BFLOAT16)
    weight.metadata_props[TRANSFORM] = "bf16"
    return weight


def is_parameter(value: ir.Value | None) -> bool:
    """Whether a value is a parameter of the checkpoint that still has its transformers form."""
    return (
        value is not None
        and value.is_initializer()
        and value.const_value is None
        and TRANSFORM not in value.metadata_props
    )
