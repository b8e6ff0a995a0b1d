"""Tokens that a router could as well send elsewhere: in another order of sums they may go there."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from moec.reference.routing import RouterConfig, route

SCORES = 1e-6
"""How far a score may move beside its logit: its own rounding, and the sum with the selection bias."""

Pattern = Callable[[np.ndarray, np.ndarray], np.ndarray]
"""What is decided `[T,N]` for logits `[T,E]` and additions `[E]` to the scores."""


def chosen(config: RouterConfig, bias: np.ndarray) -> Pattern:
    """The set of experts."""
    return lambda x, shift: np.sort(route(config, x.astype(np.float32), bias + shift)[0], axis=1)


def undecided(pattern: Pattern, logits: np.ndarray, margin: float) -> np.ndarray:
    """Which tokens' decisions change when one logit moves by the margin, or one score by `SCORES`: `[T]`."""
    still = np.zeros(logits.shape[1])
    decided, changed = pattern(logits, still), np.zeros(len(logits), bool)
    for one in np.eye(logits.shape[1]):
        for sign in (-1, 1):
            changed |= (pattern(logits + sign * margin * one, still) != decided).any(axis=1)
            changed |= (pattern(logits, sign * SCORES * one) != decided).any(axis=1)
    return changed


def decided_rows(
    draw: Callable[[int], np.ndarray], count: int, attributes: Mapping[str, Any], router: Mapping[str, Any]
) -> np.ndarray:
    """Tokens of `draw` that one PipelinedMoE sends where any other in float32 does.

    Args:
        draw: Count -> hidden states `[count,H]`.
        count: How many tokens.
        attributes: Of the operator.
        router: Its inputs router_weight, router_bias, selection_bias.
    """
    names = ("scoring", "num_groups", "topk_groups", "group_score")
    options = {name: attributes[name] for name in names if name in attributes}
    config = RouterConfig(attributes["num_experts"], attributes["top_k"], **options)
    pattern = chosen(config, router["selection_bias"])
    rows, weight = draw(count), router["router_weight"].astype(np.float64)
    for _ in range(20):
        logits = rows.astype(np.float64) @ weight.T + router["router_bias"]
        bad = undecided(pattern, logits, 1e-5 * max(1.0, float(np.abs(logits).max(initial=0))))
        if not bad.any():
            return rows
        rows[bad] = draw(int(bad.sum()))
    raise AssertionError("this router is near a tie for every token")
