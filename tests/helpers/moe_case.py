"""Inputs and attributes of a random PipelinedMoE or Experts layer."""

from __future__ import annotations

import numpy as np

from moec.reference.experts import BlobLayout, ExpertWeights, pack_expert
from tests.helpers.ties import decided_rows

ROUTER_NAMES = ("scoring", "renormalize", "num_groups", "topk_groups", "group_score", "routed_scale")


def moe_attributes(**changes: object) -> dict:
    """A small layer: 8 experts, top 2, 80 hidden, 48 intermediate."""
    base = {
        "num_experts": 8,
        "top_k": 2,
        "intermediate_size": 48,
        "activation": "silu",
        "gated": 1,
        "has_bias": 0,
        "alpha": 1.702,
        "limit": 2.0,
        "weight_format": "int4",
    }
    return base | changes


def expert_attributes(attributes: dict) -> dict:
    """Without the router's: what moec::Experts takes."""
    return {name: value for name, value in attributes.items() if name not in ROUTER_NAMES}


def moe_layout(attributes: dict, hidden: int = 80) -> BlobLayout:
    flags = bool(attributes["gated"]), bool(attributes["has_bias"])
    return BlobLayout(attributes["weight_format"], hidden, attributes["intermediate_size"], *flags)


def random_blobs(rng: np.random.Generator, layout: BlobLayout, count: int) -> np.ndarray:
    """int8 `[count, blob_bytes]`."""
    rows, hidden, size = layout.gate_up_rows, layout.hidden_size, layout.intermediate_size

    def draw(*shape):
        return rng.standard_normal(shape).astype(np.float32) / np.float32(np.sqrt(shape[-1]))

    experts = [
        ExpertWeights(draw(rows, hidden), draw(hidden, size), draw(rows), draw(hidden)) for _ in range(count)
    ]
    return np.stack([pack_expert(layout, expert) for expert in experts]).view(np.int8)


def state_dummies() -> dict[str, np.ndarray]:
    return {"residency": np.zeros(1, np.int32), "staging": np.zeros((1, 1), np.int8)}


def moe_inputs(
    rng: np.random.Generator, attributes: dict, counts: list[int], steps: int, hidden: int = 80
) -> dict:
    """Inputs of PipelinedMoE by name, for len(counts) rows of `steps` tokens."""
    experts, layout = attributes["num_experts"], moe_layout(attributes, hidden)
    router = {
        "router_weight": rng.standard_normal((experts, hidden)).astype(np.float32) / 9,
        "router_bias": rng.standard_normal(experts).astype(np.float32),
        "selection_bias": rng.standard_normal(experts).astype(np.float32) / 10,
    }

    def draw(count: int) -> np.ndarray:
        return rng.standard_normal((count, hidden)).astype(np.float32)

    return {
        "hidden": decided_rows(draw, len(counts) * steps, attributes, router),
        "num_tokens": np.array(counts, np.int32),
        **router,
        "predictor_weight": np.zeros((1, hidden), np.float32),
        "experts": random_blobs(rng, layout, experts),
        **state_dummies(),
    }
