"""`rewritten.onnx` -> `lowered.onnx`: the graph that TensorRT parses.

Every weight, cache and calibration tensor is an input, activations are fp16 or bf16, no functions are left
(in tensorrt-rtx 1.7.1 a function of the same name shadows the plugin silently), and moec nodes have exactly
the plugins' inputs and outputs. `b` and `S` stay symbolic: the engine has one static profile for decode and
one for prefill.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from moec.compile.carriers import Carrier, WeightInputs
from moec.compile.joined_norms import join_norms
from moec.compile.precision import MOEC_INPUTS, ActivationType
from moec.compile.residual_norms import fuse_residual_norms
from moec.compile.stored import StoredTensor
from moec.errors import MoecError

DTYPES = {"fp16": ir.DataType.FLOAT16, "bf16": ir.DataType.BFLOAT16}


@dataclass
class Lowered:
    """The lowered model and where its weight inputs come from."""

    model: ir.Model
    carriers: list[Carrier]

    def save(self, path: Path) -> None:
        """Write the ONNX file: self-contained, it holds no weights."""
        onnx.save(ir.to_proto(self.model), path)


def lower(model: ir.Model, stored: Mapping[str, StoredTensor], dtype: str = "fp16") -> Lowered:
    """Lower a rewritten model (moec dialect, float32, standard dense layers) for TensorRT.

    Args:
        model: Left as it is; a copy is lowered.
        stored: The tensors of weights.safetensors: they decide which parameters are quantized.
        dtype: fp16 or bf16, the type of activations.

    Raises:
        MoecError: a node or type that no plugin or TensorRT layer takes; it names the node.
    """
    if dtype not in DTYPES:
        raise MoecError(f"unknown --dtype {dtype!r}", hint="Activations on a GPU are fp16 or bf16.")
    copy = model.clone()
    copy.functions.clear()
    graph = copy.graph
    _refuse_unsupported(graph)
    weights = WeightInputs(graph, stored, DTYPES[dtype])
    for parameter in _parameters(graph, stored):
        weights.replace(parameter, exact=_wants_float(parameter) or _kept_exact(parameter, stored))
    _plugin_arity(graph)
    _unit_channels(graph)
    join_norms(graph)
    fuse_residual_norms(graph)
    graph.sort()
    ActivationType(graph, DTYPES[dtype]).run()
    return Lowered(copy, weights.carriers)


def _parameters(graph: ir.Graph, stored: Mapping[str, StoredTensor]) -> list[ir.Value]:
    found = [v for name, v in graph.initializers.items() if name in stored or f"{name}.codes" in stored]
    for name, value in graph.initializers.items():
        if value not in found and value.const_value is None:
            raise MoecError("the weights file does not hold a weight of the graph", where=name)
    return found


def _wants_float(parameter: ir.Value) -> bool:
    """True if only FLOAT inputs of moec nodes read it: routers, their biases, sink logits."""
    uses = parameter.uses()
    return bool(uses) and all(
        use.node.domain == "moec"
        and MOEC_INPUTS.get(use.node.op_type, ())[use.idx : use.idx + 1] == ("float",)
        for use in uses
    )


def _kept_exact(parameter: ir.Value, stored: Mapping[str, StoredTensor]) -> bool:
    """True for a matrix that is stored in float32: a router or a gate that stayed in standard operators."""
    tensor = stored.get(parameter.name)
    return tensor is not None and tensor.dtype == "F32" and len(tensor.shape) == 2


def _refuse_unsupported(graph: ir.Graph) -> None:
    for node in graph:
        kv_format = node.attributes.get("format")
        if node.op_type == "AsymKVAttention" and kv_format and kv_format.as_string() == "fp32":
            raise MoecError(
                "--kv fp32 is for the CPU only: GPU caches are mkv2, mkv2_lean, k4v2, int8 or fp16",
                where=node.name,
                hint="Build with --kv fp16, or with --target cpu.",
            )


def _plugin_arity(graph: ir.Graph) -> None:
    """Drops the state outputs of RESIDENT expert nodes, as the plugin does: there is no state."""
    for node in list(graph):
        if node.domain != "moec" or node.op_type not in ("PipelinedMoE", "Experts"):
            continue
        if node.attributes["num_slots"].as_int() == 0:
            for value in node.outputs[1:]:
                if value.is_graph_output():
                    graph.outputs.remove(value)
                if value.uses():
                    raise MoecError("the state of resident experts is used in the graph", where=value.name)
            node.resize_outputs(1)


def _unit_channels(graph: ir.Graph) -> None:
    """Expert blobs `[E, bytes]` become `[E, 1, bytes]`.

    TensorRT keeps a float32 scale and shift for every index of the second axis of an INT8 input: 20 MB of the
    plan, and of device memory, for the blobs of a 30B model.
    """
    for value in graph.inputs:
        if re.fullmatch(r"moe\.\d+\.experts", value.name):
            value.shape = ir.Shape([value.shape[0], 1, value.shape[1]])
