"""Identifies a router by running it: which one of a parametrised family gives the same result?

The structure of routers differs too much between families (and their versions) for patterns. Everything
between the tokens and the experts' ids and weights is run in ONNX Runtime on random tokens and compared
with `moec.reference.routing`. Weights that are not in memory are replaced by random ones: only the function
counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from moec.errors import MoecError
from moec.reference.routing import SCORINGS, RouterConfig, route, router_logits
from moec.rewrite.subgraph import Slice, run_slice

_TOKENS = 96
_TOLERANCE = 2e-5


@dataclass(frozen=True)
class Fit:
    """The router found: its constants and which parameters of the graph are its weight and biases."""

    config: RouterConfig
    weight: ir.Value
    bias: ir.Value | None
    selection_bias: ir.Value | None


@dataclass
class _Observed:
    """What the slice computed: the weights as a dense `[T,E]` matrix; and the logits' parts."""

    dense: np.ndarray
    product: np.ndarray
    values: dict[str, np.ndarray]


def fit_router(part: Slice, num_experts: int, top_k: int, hint: RouterConfig | None = None) -> Fit | str:
    """Finds the router in a slice with outputs ids `[T,K]` and weights `[T,K]`.

    Args:
        part: The slice; its inputs are views of the tokens `[T,H]`.
        num_experts, top_k: E and K.
        hint: A configuration to try first (the one of the layer before).

    Returns:
        The fit, or a sentence that says what was found instead.
    """
    weights = [
        p for p in part.parameters if _floats(p) and len(p.shape) == 2 and p.shape[0] == num_experts > 1
    ]
    weights = [w for w in weights if w.shape[1] > 1]
    if len(weights) != 1:
        return f"the slice has {len(weights)} matrices of {num_experts} rows instead of one"
    vectors = [p for p in part.parameters if _floats(p) and _size(p) == num_experts]
    observed = _observe(part, weights[0], num_experts)
    if isinstance(observed, str):
        return observed
    for bias, selection, config in _candidates(vectors, num_experts, top_k, hint):
        found = _matches(observed, config, bias, selection)
        if found:
            return Fit(found, weights[0], bias, selection)
    ops = ", ".join(sorted({n.op_type for n in part.nodes}))
    return f"no softmax, sigmoid or softmax-after-top-k router computes the same (operators: {ops})"


def _floats(value: ir.Value) -> bool:
    return value.dtype == ir.DataType.FLOAT


def _size(value: ir.Value) -> int:
    return int(np.prod(value.shape.numpy())) if value.shape.is_static() else -1


def _observe(part: Slice, weight: ir.Value, num_experts: int) -> _Observed | str:
    rng = np.random.default_rng(0)
    hidden = weight.shape[1]
    tokens = rng.standard_normal((_TOKENS, hidden)).astype(np.float32)
    values = {p.name: _random(rng, p, weight) for p in part.parameters if p.const_value is None}
    feeds = {v.name: tokens.reshape((1,) * (len(v.shape) - 2) + tokens.shape) for v in part.inputs}
    try:
        ids, weights = run_slice(part, feeds, values)
    except Exception as e:  # whatever ONNX Runtime dislikes about a part of a graph
        return f"the slice does not run alone: {str(e).splitlines()[0]}"
    dense = np.zeros((_TOKENS, num_experts), np.float32)
    np.put_along_axis(dense, ids.astype(np.int64), weights, axis=1)
    values.update({p.name: p.const_value.numpy() for p in part.parameters if p.const_value is not None})
    product = router_logits(tokens, values[weight.name], np.zeros(num_experts, np.float32))
    return _Observed(dense, product, values)


def _random(rng: np.random.Generator, value: ir.Value, weight: ir.Value) -> np.ndarray:
    """Logits near N(0,1), biases near 0.2: large enough that each one changes choices."""
    scale = value.shape[-1] ** -0.5 if value is weight else 0.2
    return (rng.standard_normal(value.shape.numpy()) * scale).astype(np.float32)


def _candidates(
    vectors: list[ir.Value], num_experts: int, top_k: int, hint: RouterConfig | None
) -> Iterator[tuple[ir.Value | None, ir.Value | None, RouterConfig]]:
    """Every (bias, selection bias, configuration); the likely ones first, groups last."""
    roles = [(b, s) for b in (None, *vectors) for s in (None, *vectors) if b is None or b is not s]
    roles.sort(key=lambda r: -sum(v is not None for v in r))  # all vectors of the slice have a role
    plain = [
        RouterConfig(num_experts, top_k, scoring, renormalize)
        for scoring in SCORINGS
        for renormalize in ((False, True) if scoring != "softmax_after_topk" else (False,))
    ]
    grouped = [replace(p, **g) for g in _groups(num_experts, top_k) for p in plain]
    for config in [*([hint] if hint else []), *plain, *grouped]:
        for bias, selection in roles:
            yield bias, selection, replace(config, routed_scale=1.0)


def _groups(num_experts: int, top_k: int) -> Iterator[dict[str, object]]:
    for groups in range(2, min(num_experts, 32) + 1):
        if num_experts % groups:
            continue
        for kept in range(1, groups):
            if kept * (num_experts // groups) >= top_k:
                for score in ("top2", "max"):
                    yield dict(num_groups=groups, topk_groups=kept, group_score=score)


def _matches(
    observed: _Observed, config: RouterConfig, bias: ir.Value | None, selection: ir.Value | None
) -> RouterConfig | None:
    """The configuration with its scale, if it computes what was observed on every token."""
    zeros = np.zeros(config.num_experts, np.float32)
    of = lambda v: zeros if v is None else observed.values[v.name].reshape(-1)  # noqa: E731
    try:
        ids, weights = route(config, observed.product + of(bias), of(selection))
    except MoecError:  # a grouping that makes no sense
        return None
    dense = np.zeros_like(observed.dense)
    np.put_along_axis(dense, ids.astype(np.int64), weights, axis=1)
    chosen = observed.dense != 0
    if not np.array_equal(chosen, dense != 0):
        return None
    scale = float(np.median(observed.dense[chosen] / dense[chosen]))
    if np.abs(observed.dense - dense * scale).max() > _TOLERANCE * max(1.0, abs(scale)):
        return None
    return replace(config, routed_scale=1.0 if abs(scale - 1) < 1e-5 else float(np.float32(round(scale, 6))))
