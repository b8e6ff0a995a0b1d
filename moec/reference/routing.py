"""Routers in NumPy: which experts a token goes to, and with which weights."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from moec.errors import MoecError

F32, F64 = np.float32, np.float64
SCORINGS = ("softmax", "sigmoid", "softmax_after_topk")


@dataclass(frozen=True)
class RouterConfig:
    """One parametrised router that covers the MoE families.

    Args:
        num_experts, top_k: E and K.
        scoring: softmax | sigmoid over all experts, or softmax_after_topk: over the chosen ones.
        renormalize: Divide the chosen weights by their sum (softmax and sigmoid).
        num_groups, topk_groups: Only experts of the best topk_groups groups can be chosen (0 or 1: any).
        group_score: Score of a group: its best expert (max) or the sum of its best two (top2).
        routed_scale: Factor on the final weights.

    Raises:
        MoecError: values that contradict each other.
    """

    num_experts: int
    top_k: int
    scoring: str = "softmax"
    renormalize: bool = False
    num_groups: int = 1
    topk_groups: int = 1
    group_score: str = "max"
    routed_scale: float = 1.0

    def __post_init__(self) -> None:
        if self.scoring not in SCORINGS or self.group_score not in ("max", "top2"):
            raise MoecError(f"unknown router scoring {self.scoring!r} / {self.group_score!r}")
        if not 1 <= self.top_k <= self.num_experts or (self.grouped and self.num_experts % self.num_groups):
            raise MoecError(f"router: top {self.top_k} of {self.num_experts} in {self.num_groups} groups")

    @property
    def grouped(self) -> bool:
        return self.num_groups > 1


def _softmax(x: np.ndarray) -> np.ndarray:
    p = np.exp(x.astype(F64) - x.max(axis=-1, keepdims=True))
    return (p / p.sum(axis=-1, keepdims=True)).astype(F32)


def top_k(scores: np.ndarray, k: int) -> np.ndarray:
    """Indices of the k largest along the last axis, descending; ties: the lower index first."""
    return np.argsort(-scores, axis=-1, kind="stable")[..., :k]


def _mask_groups(config: RouterConfig, choice: np.ndarray) -> np.ndarray:
    groups = choice.reshape(len(choice), config.num_groups, -1)
    best = -np.sort(-groups, axis=-1)
    score = best[..., 0] if config.group_score == "max" else best[..., :2].sum(axis=-1, dtype=F32)
    chosen = np.zeros(score.shape, bool)
    np.put_along_axis(chosen, top_k(score, config.topk_groups), True, axis=-1)
    return np.where(chosen[..., None], groups, F32(-np.inf)).reshape(choice.shape)


def route(
    config: RouterConfig, logits: np.ndarray, selection_bias: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Chooses experts.

    Args:
        config: The router.
        logits: float32 `[T,E]`, router bias included.
        selection_bias: float32 `[E]`, counts in the choice only.

    Returns:
        ids int32 `[T,K]` in descending order of the choice score, weights float32 `[T,K]`.
    """
    if config.scoring == "softmax":
        scores = _softmax(logits)
    elif config.scoring == "sigmoid":
        scores = (1.0 / (1.0 + np.exp(-logits.astype(F64)))).astype(F32)
    else:
        scores = logits
    choice = scores + np.asarray(selection_bias, F32)
    if config.grouped:
        choice = _mask_groups(config, choice)
    ids = top_k(choice, config.top_k)
    weights = np.take_along_axis(scores, ids, axis=-1)
    if config.scoring == "softmax_after_topk":
        weights = _softmax(weights)
    elif config.renormalize:
        weights = weights / (weights.sum(axis=-1, keepdims=True, dtype=F64) + 1e-20)
    return ids.astype(np.int32), (weights * F64(config.routed_scale)).astype(F32)


def router_logits(hidden: np.ndarray, weight: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """hidden `[T,H]`, weight `[E,H]`, bias `[E]` -> float32 `[T,E]`, accumulated in float64."""
    return (hidden.astype(F64) @ np.asarray(weight).astype(F64).T + bias.astype(F64)).astype(F32)
