"""What a build log says: the layers of each profile, memory, inputs and outputs, and the causes of a failure.

A plan cannot be opened without a GPU, so the verbose log of the build is where the engine's layers and
bindings are recorded (`profiling_verbosity=DETAILED`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_RECORD = re.compile(r"^\[(VERBOSE|INFO|WARNING|ERROR|INTERNAL_ERROR)\] ?", re.MULTILINE)
_LAYER = re.compile(r"^Name: (?P<name>.*?), LayerType: (?P<type>\w+), Inputs: \[(?P<rest>.*)$", re.MULTILINE)
_PLUGIN = re.compile(r"PluginType: (\w+)")
_TENSOR = re.compile(r"Name: ([^,]+), (?:Location|Dimensions)")
_BINDING = re.compile(
    r"^ ?Name: (?P<name>.*?), IOMode: (?P<mode>\w+), DataType: (?P<dtype>\w+), "
    r"Dimensions: \[(?P<shape>[-\d,]*)\].*?ProfileInfo: \[(?P<profiles>.*)\]\s*$",
    re.MULTILINE,
)
_OPT_SHAPE = re.compile(r"OptShape: \[([-\d,]*)\]")
_PROFILE = re.compile(r" \[profile (\d+)\]")
_MYELIN_SUFFIX = re.compile(r"_myl\d+_\d+$")
# Synchronisation and views: they move nothing.
_COPIES = {"Reformat", "Copy", "copy", "memcpy", "Memcpy"}


@dataclass(frozen=True)
class Layer:
    """One layer of the engine.

    Attributes:
        name: Without its profile and region suffixes: a plugin layer has its node's name.
        type: PluginV3, custom_layer (a plugin inside a fused region), gemm, kgen, NoOp...
        profile: 0 decode, 1 prefill.
        plugin: The plugin's type, where the layer says so.
        tensors: Inputs, then outputs.
    """

    name: str
    type: str
    profile: int
    plugin: str | None
    tensors: tuple[str, ...]

    @property
    def is_copy(self) -> bool:
        return self.type in _COPIES


@dataclass(frozen=True)
class EngineTensor:
    """An input or output as the engine records it; `shapes` has one entry a profile."""

    name: str
    mode: str
    dtype: str
    shapes: tuple[tuple[int, ...], ...]


@dataclass
class BuildLog:
    """The parsed log. `activation_bytes` and `scratch_bytes` have one entry a profile."""

    layers: list[Layer] = field(default_factory=list)
    bindings: list[EngineTensor] = field(default_factory=list)
    activation_bytes: list[int] = field(default_factory=list)
    scratch_bytes: list[int] = field(default_factory=list)
    weights_bytes: int = 0


def parse_log(text: str) -> BuildLog:
    """Read the log of a successful build."""
    start = text.rfind("] Layers:")
    tail = text[start:] if start >= 0 else ""
    weights = _numbers(text, "Total Weights Memory")
    return BuildLog(
        layers=_layers(tail),
        bindings=list({b.name: b for b in map(_binding, _BINDING.finditer(tail))}.values()),
        activation_bytes=_numbers(text, "Total Activation Memory"),
        scratch_bytes=_numbers(text, "Max Scratch Memory"),
        weights_bytes=weights[-1] if weights else 0,
    )


def _numbers(text: str, label: str) -> list[int]:
    return [int(number) for number in re.findall(rf"{label}: (\d+) bytes", text)]


def _layers(text: str) -> list[Layer]:
    """Profiles follow each other, and kernels inside a fused region do not repeat theirs."""
    layers, profile = [], 0
    for match in _LAYER.finditer(text):
        marked = _PROFILE.search(match["name"])
        profile = max(profile, int(marked[1]) if marked else 0)
        layers.append(_layer(match, profile))
    return layers


def _layer(match: re.Match[str], profile: int) -> Layer:
    plugin = _PLUGIN.search(match["rest"])
    name = _PROFILE.sub("", match["name"])
    return Layer(
        name=_MYELIN_SUFFIX.sub("", name) if match["type"] == "custom_layer" else name,
        type=match["type"],
        profile=profile,
        plugin=plugin[1] if plugin else None,
        tensors=tuple(_PROFILE.sub("", tensor) for tensor in _TENSOR.findall(match["rest"])),
    )


def _binding(match: re.Match[str]) -> EngineTensor:
    shapes = [_shape(text) for text in _OPT_SHAPE.findall(match["profiles"])]
    return EngineTensor(
        match["name"], match["mode"], match["dtype"], tuple(shapes or [_shape(match["shape"])])
    )


def _shape(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(",") if size)


def causes(text: str, limit: int = 3) -> list[str]:
    """Why a build failed, most telling first: our plugins' own messages, then TensorRT's errors."""
    ours = [line[7:] for line in text.splitlines() if line.startswith("[moec] ")]
    records = _RECORD.split(text)[1:]
    pairs = zip(records[::2], records[1::2], strict=True)
    theirs = [body.strip().splitlines()[0] for kind, body in pairs if kind.endswith("ERROR") and body.strip()]
    theirs = [line for line in theirs if "catchCudaError" not in line]
    return list(dict.fromkeys(ours + theirs))[:limit]
