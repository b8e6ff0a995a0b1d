"""What a user should know of a model's cache before it is built: latent attention, recurrent states."""

from __future__ import annotations

from math import prod
from typing import Any

from moec.bundle.geometry import Geometry


def caveats(config: Any, geometry: Geometry) -> list[str]:
    """Sentences for the report.

    Args:
        config: The transformers configuration.
        geometry: What was captured of it.
    """
    return [s for s in (_latent(config, geometry), _recurrent(geometry)) if s]


def _latent(config: Any, geometry: Geometry) -> str | None:
    """Multi-head latent attention runs with its keys and values expanded."""
    rank = getattr(config, "kv_lora_rank", None)
    if not rank or not geometry.attention:
        return None
    layer = max(geometry.attention, key=lambda a: a.num_kv_heads * (a.k_dim + a.v_dim))
    expanded = layer.num_kv_heads * (layer.k_dim + layer.v_dim)
    latent = rank + (getattr(config, "qk_rope_head_dim", 0) or 0)
    return (
        f"latent attention is cached expanded: {expanded} numbers a token and layer, where a latent cache "
        f"has {latent}; the quantized cache saves nothing over that"
    )


def _recurrent(geometry: Geometry) -> str | None:
    if not geometry.states:
        return None
    layers = len({state.layer for state in geometry.states})
    size = 4 * sum(prod(state.shape) for state in geometry.states)
    return f"{layers} recurrent layers keep float32 states of {size / 1e6:.1f} MB a slot beside the cache"
