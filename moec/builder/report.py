"""What a build did: passes, times, sizes, warnings; `build_report.json` and the table at the end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from moec.bundle.geometry import Geometry
from moec.progress import SizeTable
from moec.reference.kv_layout import KVLayout

REPORT = "build_report.json"


@dataclass
class BuildReport:
    """The result of `moec.build`.

    Attributes:
        path: The bundle.
        options: The arguments, with the context that was chosen.
        passes: One record a rewrite pass: name, applied, seconds, notes.
        seconds: Wall time by phase.
        sizes: Bytes by component, and `*_bf16`: what the same would take in bf16 (fp16 for the cache).
        warnings: What the user was told.
        cache: `layers`: format and relative error of attention of every layer with blocks. With --kv auto
            also budget, divergence, raised layers, and what was tried.
        engines: One record an engine: plan, targets, layers by profile, aliases, memory, seconds.
    """

    path: Path
    options: dict[str, Any]
    passes: list[dict[str, Any]] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)
    sizes: dict[str, int] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)
    engines: list[dict[str, Any]] = field(default_factory=list)
    cache: dict[str, Any] = field(default_factory=dict)

    def to_json(self) -> dict[str, Any]:
        """A tree of plain JSON values, without the bundle's own path."""
        tree = asdict(self)
        del tree["path"]
        tree["seconds"] = {name: round(value, 3) for name, value in self.seconds.items()}
        return tree


def cache_sizes(layouts: Mapping[int, KVLayout]) -> dict[str, int]:
    """Bytes of one slot's cache.

    Returns:
        `cache_slot`: as allocated for the full context; `cache_token`: what one more token takes once the
        ring is full; `*_bf16`: the same cache in fp16.
    """
    plain = [_as_fp16(layout) for layout in layouts.values()]
    return {
        "cache_slot": sum(x.bytes_allocated(1) for x in layouts.values()),
        "cache_slot_bf16": sum(x.bytes_allocated(1) for x in plain),
        "cache_token": sum(token_bytes(x) for x in layouts.values()),
        "cache_token_bf16": sum(token_bytes(x) for x in plain),
    }


def _as_fp16(layout: KVLayout) -> KVLayout:
    return KVLayout(
        "fp16", layout.num_kv_heads, layout.k_dim, layout.v_dim, layout.context, window=layout.window
    )


def token_bytes(layout: KVLayout) -> int:
    """Bytes that a token adds to a layer's cache; 0 for windowed layers, which reuse theirs."""
    if layout.window:
        return 0
    if layout.quantized:
        return layout.num_kv_heads * layout.block_bytes // layout.block_tokens
    return layout.num_kv_heads * layout.row_dim * layout.ring_dtype.itemsize


def expert_elements(geometry: Geometry) -> int:
    """Weights in all routed experts, biases left out."""
    return sum(
        m.num_experts * m.hidden_size * m.intermediate_size * (3 if m.gated else 2) for m in geometry.moe
    )


def size_table(sizes: Mapping[str, int], options: Mapping[str, Any]) -> SizeTable:
    """The table that ends a build; megabytes are 10^6 bytes."""
    context = options["context"]
    rows = [
        ("dense weights", options["weights"], "dense", _mb),
        ("embeddings, output head", "int8" if options["weights"] == "int4" else "bf16", "vocabulary", _mb),
        ("routed experts", options["experts"], "experts", _mb),
        ("engine", "", "engine", _mb),
        ("graph, tokenizer, calibration", "", "other", _mb),
        ("bundle", "", "total", _mb),
        (f"KV cache, one slot of {context}", options["kv"], "cache_slot", _mb),
        ("KV cache, one more token", options["kv"], "cache_token", lambda n: f"{n:,} B"),
    ]
    table = SizeTable("Sizes", ["component", "format", "size", "as bf16/fp16", "of that"])
    for title, kind, key, show in rows:
        if key == "engine" and not sizes.get(key):
            continue
        table.rows.append([title, kind, *_compare(sizes[key], sizes.get(f"{key}_bf16"), show)])
    return table


def _compare(size: int, plain: int | None, show: Any) -> list[str]:
    return [show(size), show(plain), f"{100 * size / plain:.1f} %"] if plain else [show(size), "", ""]


def _mb(size: int) -> str:
    return f"{size / 1e6:.1f} MB"
