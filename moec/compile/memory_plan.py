"""What the runtime binds to an engine, and the device memory that takes; the manifest keeps both."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from math import prod
from typing import Any

import onnx

from moec.compile.build_log import EngineTensor
from moec.compile.carriers import Carrier
from moec.compile.checks import aliases_of
from moec.compile.places import WEIGHTS, BundlePlaces, Place
from moec.compile.report import PROFILES, EngineReport
from moec.errors import MoecError

_ITEM = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "int32": 4, "int64": 8, "bool": 1}
_ONNX = {
    onnx.TensorProto.FLOAT: "float32",
    onnx.TensorProto.FLOAT16: "float16",
    onnx.TensorProto.BFLOAT16: "bfloat16",
    onnx.TensorProto.INT8: "int8",
    onnx.TensorProto.INT32: "int32",
    onnx.TensorProto.INT64: "int64",
    onnx.TensorProto.BOOL: "bool",
}
_ENGINE = {
    "Float": "float32",
    "Half": "float16",
    "BFloat16": "bfloat16",
    "BF16": "bfloat16",
    "Int8": "int8",
    "Int32": "int32",
    "Int64": "int64",
    "Bool": "bool",
}
_SOURCES = (
    (r"input_ids|slot_ids|lengths|num_tokens", "request"),
    (r"kv\.\d+\.(blocks|ring)|state\.\d+\.\w+", "cache"),
    (r"kv\.\d+\.(k_mean|k_ref|k_order|v_ref)", "calibration"),
    (r"moe\.\d+\.experts", "store"),
)


@dataclass(frozen=True)
class EngineBinding:
    """One input or output of an engine.

    Attributes:
        name: Name in the engine.
        dtype: NumPy name (bfloat16 as in ml_dtypes).
        shapes: Static shape in each profile: decode, prefill.
        nbytes: Device bytes, of the larger profile.
        source: request | cache | calibration | store | weights (inputs), result | cache (outputs).
        place: Bytes in a file of the bundle (calibration, store, weights).
        transform: none, or cast: the file's elements are converted to `dtype` at upload.
        alias_of: For an output, the input whose memory it is. The state of a recurrent layer is written by
            standard layers, which cannot write in place: its output "X.out" of source cache is a second
            buffer, exchanged with the input X after every step.
    """

    name: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]
    nbytes: int
    source: str
    place: Place | None = None
    transform: str = "none"
    alias_of: str | None = None


@dataclass(frozen=True)
class MemoryPlan:
    """Device memory of one engine in bytes, by use. `total` is what a GPU must have free."""

    weights: int
    experts: int
    cache: int
    calibration: int
    request: int
    result: int
    activations: int
    total: int


def binding_table(
    model: onnx.ModelProto, carriers: Sequence[Carrier], places: BundlePlaces, batch: int, chunk: int
) -> list[EngineBinding]:
    """Every input and output of the engine that is built from a lowered graph.

    Args:
        model: The lowered graph.
        carriers: Its weight inputs, from `lowering.lower`.
        places: Where the bundle's files have their tensors.
        batch, chunk: Sizes of the decode (b=batch, S=1) and the prefill profile (b=1, S=chunk).

    Raises:
        MoecError: an input that no file or request gives, or whose file has too few bytes.
    """
    sizes = [{"b": batch, "S": 1}, {"b": 1, "S": chunk}]
    by_input = {carrier.input: carrier for carrier in carriers}
    inputs = [_input(_plain(value, sizes), by_input, places) for value in model.graph.input]
    aliases = aliases_of(model)
    outputs = [_output(_plain(value, sizes), aliases) for value in model.graph.output]
    return inputs + outputs


def _plain(value: onnx.ValueInfoProto, sizes: list[dict[str, int]]) -> EngineBinding:
    tensor = value.type.tensor_type
    dtype = _ONNX[tensor.elem_type]
    dims = [dim.dim_param or dim.dim_value for dim in tensor.shape.dim]
    shapes = tuple(tuple(size.get(dim, dim) for dim in dims) for size in sizes)
    return EngineBinding(value.name, dtype, shapes, max(map(prod, shapes)) * _ITEM[dtype], "")


def _input(binding: EngineBinding, carriers: Mapping[str, Carrier], places: BundlePlaces) -> EngineBinding:
    name = binding.name
    if name in carriers:
        tensor = places.weights[carriers[name].tensor]
        place = Place(WEIGHTS, tensor.offset, tensor.nbytes)
        placed = replace(binding, source="weights", place=place, transform=carriers[name].transform)
    else:
        source = next((s for pattern, s in _SOURCES if re.fullmatch(pattern, name)), "")
        placed = replace(binding, source=source, place=places.calibration.get(name) or places.store.get(name))
    _check_place(placed)
    return placed


def _check_place(binding: EngineBinding) -> None:
    if not binding.source:
        raise MoecError("the engine has an input that nothing gives", where=binding.name)
    if binding.source in ("weights", "store", "calibration"):
        if binding.place is None:
            raise MoecError(f"the bundle has no {binding.source} for an engine input", where=binding.name)
        if binding.transform == "none" and binding.place.nbytes != binding.nbytes:
            sizes = f"{binding.place.nbytes} bytes, the engine takes {binding.nbytes}"
            raise MoecError(f"{binding.place.file} has {sizes}", where=binding.name)


def _output(binding: EngineBinding, aliases: Mapping[str, str]) -> EngineBinding:
    alias = aliases.get(binding.name)
    cached = alias or binding.name.startswith("state.")
    return replace(binding, source="cache" if cached else "result", alias_of=alias)


def memory_plan(table: Iterable[EngineBinding], report: EngineReport) -> MemoryPlan:
    """Add up a binding table and the engine's own activations."""
    table = list(table)

    def of(*sources: str) -> int:
        return sum(b.nbytes for b in table if b.source in sources and b.alias_of is None)

    parts = {
        "weights": of("weights") + report.weights_bytes,
        "experts": of("store"),
        "cache": of("cache"),
        "calibration": of("calibration"),
        "request": of("request"),
        "result": of("result"),
        "activations": max(profile.activation_bytes for profile in report.profiles),
    }
    return MemoryPlan(**parts, total=sum(parts.values()))


def check_recorded(table: Iterable[EngineBinding], recorded: Iterable[EngineTensor]) -> None:
    """Compare the binding table with the inputs and outputs that the engine itself records.

    Raises:
        MoecError: naming the first tensor that differs.
    """
    ours = {b.name: (b.dtype, b.shapes) for b in table}
    theirs = {t.name: (_ENGINE.get(t.dtype, t.dtype), _per_profile(t)) for t in recorded}
    for name in sorted({*ours, *theirs}):
        if not _same(ours.get(name), theirs.get(name)):
            what = f"the plan says {ours.get(name)}, the engine {theirs.get(name)}"
            raise MoecError(f"the binding table does not fit the engine: {what}", where=name)


def _per_profile(tensor: EngineTensor) -> tuple[tuple[int, ...], ...]:
    return tensor.shapes if len(tensor.shapes) == len(PROFILES) else tensor.shapes * len(PROFILES)


def _same(ours: Any, theirs: Any) -> bool:
    """Engines record the shapes of outputs for the decode profile only."""
    if ours is None or theirs is None:
        return False
    return ours[0] == theirs[0] and (ours[1] == theirs[1] or ours[1][0] == theirs[1][0] == theirs[1][1])


def to_json(table: Iterable[EngineBinding]) -> list[dict[str, Any]]:
    """For the manifest."""
    return [asdict(binding) for binding in table]


def from_json(tree: Iterable[Mapping[str, Any]]) -> list[EngineBinding]:
    """The inverse of `to_json`."""
    return [
        EngineBinding(
            **{
                **entry,
                "shapes": tuple(tuple(shape) for shape in entry["shapes"]),
                "place": Place(**entry["place"]) if entry["place"] else None,
            }
        )
        for entry in tree
    ]
