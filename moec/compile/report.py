"""What is known of a built engine: written to `build_report.json` and shown to the user."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from moec.compile.build_log import BuildLog, EngineTensor, Layer

PROFILES = ("decode", "prefill")


@dataclass(frozen=True)
class ProfileReport:
    """One static profile of the engine.

    Attributes:
        name: decode (b=B, S=1) or prefill (b=1, S=chunk).
        plugin_layers: Layers of each plugin: {"AsymKVAttention": 30, ...}.
        layer_types: Layers of each type that TensorRT reports.
        layers: Their names in execution order.
        copies: Copy layers, and layers other than the plugin that touch a cache tensor; must be empty.
        activation_bytes, scratch_bytes: Device memory that the execution context allocates.
    """

    name: str
    plugin_layers: dict[str, int]
    layer_types: dict[str, int]
    layers: tuple[str, ...]
    copies: tuple[str, ...]
    activation_bytes: int
    scratch_bytes: int


@dataclass(frozen=True)
class EngineReport:
    """A built plan.

    Attributes:
        plan: File name; plan_bytes, plan_sha256: its size and SHA-256.
        tensorrt: Module and version that built it.
        targets: GPU architectures it runs on.
        aliases: Output name -> input name whose memory it is.
        alias_queries: How often TensorRT asked the plugins for aliases.
        plugin_library_bytes, plugin_library_sha256: The library inside the plan.
        bindings: Inputs and outputs as the engine records them.
        seconds, peak_rss_bytes: Of the build child.
        log: Path of the full log.
    """

    plan: str
    plan_bytes: int
    plan_sha256: str
    tensorrt: str
    targets: tuple[str, ...]
    profiles: tuple[ProfileReport, ...]
    aliases: dict[str, str]
    alias_queries: int
    plugin_library_bytes: int
    plugin_library_sha256: str
    weights_bytes: int
    seconds: float
    peak_rss_bytes: int
    log: str
    bindings: tuple[EngineTensor, ...] = field(default=(), repr=False)

    def to_json(self) -> dict[str, Any]:
        """A tree of JSON values (without the bindings: the manifest's binding table has them)."""
        tree = dataclasses.asdict(self)
        del tree["bindings"]
        tree["log"] = Path(self.log).name
        return tree


def profile_report(
    index: int, log: BuildLog, plugins: Mapping[str, str], aliases: Mapping[str, str]
) -> ProfileReport:
    """Sum up one profile. `plugins`: node name -> plugin type; `aliases`: output -> input."""
    layers = [layer for layer in log.layers if layer.profile == index]
    plugin_layers = Counter(plugins[layer.name] for layer in layers if _is_plugin(layer, plugins))
    state = {*aliases, *aliases.values()}
    # Standard layers write recurrent states: those are copied. A copy of a KV cache still touches it.
    recurrent = any(tensor.name.startswith("state.") for tensor in log.bindings)
    copies = [
        layer.name for layer in layers if (layer.is_copy and not recurrent) or _touches(layer, state, plugins)
    ]
    return ProfileReport(
        name=PROFILES[index],
        plugin_layers=dict(sorted(plugin_layers.items())),
        layer_types=dict(sorted(Counter(layer.type for layer in layers).items())),
        layers=tuple(layer.name for layer in layers),
        copies=tuple(copies),
        activation_bytes=log.activation_bytes[index],
        scratch_bytes=log.scratch_bytes[index],
    )


def _is_plugin(layer: Layer, plugins: Mapping[str, str]) -> bool:
    return layer.name in plugins and layer.type in ("PluginV3", "custom_layer")


def _touches(layer: Layer, state: set[str], plugins: Mapping[str, str]) -> bool:
    return not _is_plugin(layer, plugins) and not state.isdisjoint(layer.tensors)
