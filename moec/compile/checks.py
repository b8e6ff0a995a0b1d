"""What has to hold of a lowered graph before TensorRT sees it, so that the message can name the node."""

from __future__ import annotations

from pathlib import Path

import onnx
from google.protobuf.message import DecodeError

from moec.errors import MoecError

PLUGINS = ("AsymKVAttention", "PipelinedMoE", "Experts", "QuantizedLinear", "AddRMSNorm")
_ALIASES = {
    "AsymKVAttention": {1: 3, 2: 4},
    "PipelinedMoE": {1: 7, 2: 8},
    "Experts": {1: 5, 2: 6},
}
_TYPES = {
    onnx.TensorProto.FLOAT, onnx.TensorProto.FLOAT16, onnx.TensorProto.BFLOAT16, onnx.TensorProto.INT8,
    onnx.TensorProto.INT32, onnx.TensorProto.INT64, onnx.TensorProto.INT4, onnx.TensorProto.BOOL,
}  # fmt: skip


def load_graph(path: Path) -> onnx.ModelProto:
    """Read an ONNX file.

    Raises:
        MoecError: it is missing or not an ONNX file.
    """
    try:
        return onnx.load(path, load_external_data=False)
    except (OSError, DecodeError) as error:
        raise MoecError("the lowered graph cannot be read", where=str(path), hint=str(error)) from error


def plugin_nodes(model: onnx.ModelProto) -> dict[str, str]:
    """Name -> op of every moec node."""
    return {node.name: node.op_type for node in model.graph.node if node.domain == "moec"}


def aliases_of(model: onnx.ModelProto) -> dict[str, str]:
    """Output -> the input whose memory it is, for every state output of a moec node."""
    found = {}
    for node in model.graph.node:
        if node.domain == "moec":
            pairs = _ALIASES.get(node.op_type, {}).items()
            found |= {node.output[out]: node.input[into] for out, into in pairs if out < len(node.output)}
    return found


def check_graph(model: onnx.ModelProto, path: Path) -> None:
    """Refuse what TensorRT would take silently, or refuse without naming the place.

    Raises:
        MoecError: a function left in the graph, an op with no plugin, a tensor type or a symbolic size that
            no engine input can have, a cache that is used twice.
    """
    for function in model.functions:
        raise MoecError(
            f"function {function.domain}::{function.name} is left in the graph: it would shadow the plugin",
            where=str(path),
        )
    for node in model.graph.node:
        if node.domain == "moec" and node.op_type not in PLUGINS:
            raise MoecError(f"there is no TensorRT plugin for {node.domain}::{node.op_type}", where=node.name)
    for value in [*model.graph.input, *model.graph.output]:
        _check_type(value)
    _check_states(model)


def _check_type(value: onnx.ValueInfoProto) -> None:
    tensor = value.type.tensor_type
    if tensor.elem_type not in _TYPES:
        kind = onnx.TensorProto.DataType.Name(tensor.elem_type)
        raise MoecError(f"TensorRT has no tensors of type {kind}", where=value.name)
    for dim in tensor.shape.dim:
        if dim.dim_param and dim.dim_param not in ("b", "S"):
            raise MoecError(f"symbolic size {dim.dim_param!r} has no value", where=value.name)


def _check_states(model: onnx.ModelProto) -> None:
    """Two plugins that update one tensor would need a copy, which TensorRT inserts or refuses."""
    owner: dict[str, str] = {}
    for node in model.graph.node:
        for out, into in _ALIASES.get(node.op_type, {}).items() if node.domain == "moec" else ():
            name = node.input[into] if out < len(node.output) else None
            if name is not None and name in owner:
                raise MoecError(f"cache {name} is updated by {owner[name]} and {node.name}", where=node.name)
            if name is not None:
                owner[name] = node.name
