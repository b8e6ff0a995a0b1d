"""The operators moec::PipelinedMoE and moec::Experts in NumPy."""

from __future__ import annotations

import numpy as np

from moec.errors import MoecError
from moec.reference.experts import BlobLayout, run_expert, unpack_expert
from moec.reference.routing import RouterConfig, route, router_logits

F32 = np.float32


def valid_tokens(count: int, num_tokens: np.ndarray) -> np.ndarray:
    """Boolean `[T]`: which of the T = b*S flattened tokens are not padding."""
    per_row = count // len(num_tokens)
    return (np.arange(per_row) < np.asarray(num_tokens)[:, None]).reshape(-1)


def experts(
    hidden: np.ndarray,
    num_tokens: np.ndarray,
    ids: np.ndarray,
    weights: np.ndarray,
    experts: np.ndarray,
    residency: np.ndarray,
    staging: np.ndarray,
    *,
    num_experts: int,
    top_k: int,
    activation: str = "silu",
    gated: int = 1,
    alpha: float = 1.0,
    limit: float = 0.0,
    weight_format: str = "int4",
    group_size: int = 64,
    intermediate_size: int,
    has_bias: int = 0,
    tile_layout: str = "rows",
    horizon: int = 0,
    num_slots: int = 0,
    compute: str = "fp32",
    layer: int = 0,
    version: int = 1,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Weighted sum of the chosen experts of each token.

    Args:
        hidden: float32 `[T,H]`, T = b*S.
        num_tokens: int32 `[b]`; tokens of row r from num_tokens[r] on are padding and give zero.
        ids: int32 `[T,K]`; weights: float32 `[T,K]`.
        experts: int8 or uint8 `[E, blob_bytes]` (resident: slot = expert id).
        residency, staging: Dummies while num_slots is 0.

    Returns:
        out float32 `[T,H]`, summed over K in order in float32; copies of residency and staging.

    Raises:
        MoecError: attributes or blobs of another format, ids out of range.
    """
    if num_slots or tile_layout != "rows" or version != 1:
        what = (
            f"experts with num_slots {num_slots}, tile_layout {tile_layout!r}, version {version} are unknown"
        )
        raise MoecError(what, where=f"layer {layer}")
    layout = BlobLayout(
        weight_format, hidden.shape[1], intermediate_size, bool(gated), bool(has_bias), group_size
    )
    if experts.shape != (num_experts, layout.blob_bytes):
        what = f"expert blobs have shape {experts.shape}, expected {(num_experts, layout.blob_bytes)}"
        raise MoecError(what, where=f"layer {layer}")
    valid = valid_tokens(len(hidden), num_tokens)
    used = np.unique(ids[valid])
    if used.size and (used[0] < 0 or used[-1] >= num_experts):
        raise MoecError("expert id out of range", where=f"layer {layer}")
    each = np.zeros((len(hidden), top_k, hidden.shape[1]), F32)
    for expert in used:
        token, rank = np.nonzero((ids == expert) & valid[:, None])
        unpacked = unpack_expert(layout, experts[expert])
        each[token, rank] = run_expert(layout, unpacked, hidden[token], activation, alpha, limit, compute)
    out = np.zeros(hidden.shape, F32)
    for rank in range(top_k):
        out += np.where(valid[:, None], weights[:, rank, None].astype(F32) * each[:, rank], F32(0))
    return out, residency.copy(), staging.copy()


def pipelined_moe(
    hidden: np.ndarray,
    num_tokens: np.ndarray,
    router_weight: np.ndarray,
    router_bias: np.ndarray,
    selection_bias: np.ndarray,
    predictor_weight: np.ndarray,
    experts: np.ndarray,
    residency: np.ndarray,
    staging: np.ndarray,
    *,
    num_experts: int,
    top_k: int,
    scoring: str = "softmax",
    renormalize: int = 0,
    num_groups: int = 1,
    topk_groups: int = 1,
    group_score: str = "max",
    routed_scale: float = 1.0,
    predictor_rows: int = 0,
    **expert_attributes: object,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Router, top-k and experts.

    Args:
        hidden, num_tokens, experts, residency, staging: As in `experts`.
        router_weight: float32 `[E,H]`; router_bias: float32 `[E]`, in the logits.
        selection_bias: float32 `[E]`, in the choice only.
        predictor_weight: Moves bytes, never results: unused here.
        predictor_rows: Rows of predictor_weight that count.
        expert_attributes: The attributes of `experts`.

    Returns:
        out float32 `[T,H]`; residency and staging.

    Raises:
        MoecError: as `experts`, and routers that do not exist.
    """
    config = RouterConfig(
        num_experts, top_k, scoring, bool(renormalize), num_groups, topk_groups, group_score, routed_scale
    )
    hidden = np.asarray(hidden, F32)
    ids, weights = route(config, router_logits(hidden, router_weight, router_bias), selection_bias)
    return _experts(
        hidden, num_tokens, ids, weights, experts, residency, staging,
        num_experts=num_experts, top_k=top_k, **expert_attributes,
    )  # fmt: skip


_experts = experts  # the operator's name is also the name of its input
