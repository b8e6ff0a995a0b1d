"""Router + moec::Experts -> moec::PipelinedMoE. A router that does not fit keeps its standard operators."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir

from moec.reference.routing import RouterConfig
from moec.rewrite.context import RewriteContext, Rule, add_initializer
from moec.rewrite.experts import describe
from moec.rewrite.router_fit import Fit, fit_router
from moec.rewrite.subgraph import Slice, backward_slice, views_of


class RouterRule(Rule):
    """Matches any Experts node and identifies what makes its ids and weights by running it."""

    def __init__(self, context: RewriteContext, notes: list[str]) -> None:
        super().__init__(context, notes)
        self.fits: dict[int, Fit] = {}
        self.hint: RouterConfig | None = None

    def pattern(self, op, hidden, num_tokens, ids, weights, experts, residency, staging):
        return op.Experts(
            hidden, num_tokens, ids, weights, experts, residency, staging,
            _domain="moec", _allow_other_attributes=True, _outputs=["out", "residency_out", "staging_out"],
        )  # fmt: skip

    def reason(self, hidden, ids, weights, out, **_):
        attributes = out.producer().attributes
        layer = attributes["layer"].as_int()
        where = f"router of layer {layer}"
        part = backward_slice([ids, weights], views_of(hidden))
        if part is None or not part.nodes:
            return where, "its ids and weights depend on more than the tokens that the experts see"
        fit = fit_router(part, attributes["num_experts"].as_int(), attributes["top_k"].as_int(), self.hint)
        if isinstance(fit, str):
            self.context.keep_float.update(_names(part))
            return where, fit
        self.fits[layer], self.hint = fit, fit.config
        return None

    def rewrite(self, op, hidden, num_tokens, experts, residency, staging, out, **_):
        old = out.producer().attributes
        fit = self.fits[old["layer"].as_int()]
        graph = experts.graph
        e, h = fit.weight.shape
        predictor = add_initializer(graph, f"moec.zeros.1x{h}", np.zeros((1, h), np.float32))
        router = [
            fit.weight,
            _vector(op, graph, fit.bias, e),
            _vector(op, graph, fit.selection_bias, e),
            predictor,
        ]
        return op.PipelinedMoE(
            hidden, num_tokens, *router, experts, residency, staging,
            **{n: a.value for n, a in old.items()}, **_attributes(fit.config), predictor_rows=0,
            _domain="moec", _version=1, _outputs=3,
        )  # fmt: skip


def _names(part: Slice) -> list[str]:
    return [p.name for p in part.parameters if p.const_value is None]


def _vector(op: Any, graph: ir.Graph, value: ir.Value | None, size: int) -> ir.Value:
    """A bias as `[E]`; zeros where the router has none."""
    if value is None:
        return add_initializer(graph, f"moec.zeros.{size}", np.zeros(size, np.float32))
    return value if len(value.shape) == 1 else op.Reshape(value, op.Constant(value_ints=[size]))


def _attributes(config: RouterConfig) -> dict[str, Any]:
    return dict(
        scoring=config.scoring,
        renormalize=int(config.renormalize),
        num_groups=config.num_groups,
        topk_groups=config.topk_groups,
        group_score=config.group_score,
        routed_scale=config.routed_scale,
    )


def lower_router(model: ir.Model, context: RewriteContext, notes: list[str]) -> int:
    """Rewrites every router that fits; the rest is named in the notes."""
    count = RouterRule(context, notes).apply(model)
    for node in model.graph:
        if node.op_type == "PipelinedMoE":
            describe(node, f"moe.{node.attributes['layer'].as_int()}")
    return count
