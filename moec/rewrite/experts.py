"""Gathered expert weights and their products -> moec::Experts over expert blobs."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import pattern

from moec.bundle.geometry import MoELayer
from moec.errors import MoecError
from moec.reference.experts import BlobLayout
from moec.rewrite.context import OTHER, RewriteContext, Rule, add_initializer, add_input, graph_input, scalar

ANY = pattern.ANY_VALUE


class ExpertsRule(Rule):
    """One MoE layer whose form (gated, transposed, interleaved, activation) is that of `form`."""

    def __init__(self, context: RewriteContext, notes: list[str], form: MoELayer) -> None:
        super().__init__(context, notes)
        self.form = form

    def pattern(self, op, x, ids, weights, gate_up, down):
        h = self._linear(op, op.Unsqueeze(x, ANY), gate_up, ids, "gate_up_bias")
        h = self._gate(op, h) if self.form.gated else self._activate(op, h)
        y = self._linear(op, op.Unsqueeze(h, ANY), down, ids, "down_bias")
        weighted = op.Mul(y, op.Unsqueeze(weights, ANY))
        return op.ReduceSum(weighted, ANY, keepdims=0, _allow_other_attributes=True)

    def _linear(self, op, h, weight, ids, bias):
        w = op.Gather(weight, ids, axis=0)
        if not self.form.transposed:
            w = op.Transpose(w, perm=[0, 1, 3, 2])
        y = op.Squeeze(op.MatMul(h, w), ANY)
        return op.Add(y, op.Gather(pattern.Var(bias), ids, axis=0)) if self.form.has_bias else y

    def _gate(self, op, h):
        if self.form.interleaved:
            g, u = (op.Slice(h, pattern.Var(n), ANY, ANY, ANY) for n in ("gate_start", "up_start"))
        else:
            g, u = op.Split(h, axis=-1, num_outputs=2, _outputs=2)
        if self.form.activation != "swiglu_oai":
            return op.Mul(self._activate(op, g), u)
        g, u = op.Min(g, pattern.Var("limit")), op.Clip(u, ANY, pattern.Var("limit"))
        return op.Mul(op.Add(u, 1.0), op.Mul(g, op.Sigmoid(op.Mul(g, pattern.Var("alpha")))))

    def _activate(self, op, x):
        match self.form.activation:
            case "silu":
                return op.Swish(x, _allow_other_attributes=True)
            case "relu2":
                r = op.Relu(x)
                return op.Mul(r, r)
        approximate = "tanh" if self.form.activation == "gelu_tanh" else "none"
        return op.Gelu(x, approximate=approximate)

    def reason(self, x, ids, gate_up, down, limit=None, alpha=None, gate_start=None, up_start=None, **_):
        m = self.context.moe_by_weight(gate_up.name)
        if m is None:
            return f"experts {gate_up.name}", "they are not in the geometry"
        if _form(m) != _form(self.form):
            return OTHER  # the rule of another layer's form
        where = f"experts of layer {m.layer}"
        if down.name != m.down:
            return where, f"the second projection is {down.name}, not {m.down}"
        if len(x.shape) != 2 or x.shape[1] != m.hidden_size or ids.shape[1] != m.top_k:
            return where, f"tokens are {x.shape}, choices {ids.shape}"
        if gate_start is not None and (scalar(gate_start), scalar(up_start)) != (0, 1):
            return where, "gate and up rows do not alternate, gate first"
        found, rtol = (scalar(alpha), scalar(limit)), self.context.tolerance
        if alpha is not None and not np.allclose(found, (m.alpha, m.limit), rtol=rtol):
            return where, "alpha or limit differ from the geometry"
        return None

    def rewrite(self, op, x, ids, weights, gate_up, **_):
        m = self.context.moe_by_weight(gate_up.name)
        graph = gate_up.graph
        out, *_ = op.Experts(
            x, graph_input(graph, "num_tokens"), op.Cast(ids, to=ir.DataType.INT32), weights,
            *store_inputs(graph, m), **expert_attributes(m, self.context),
            _domain="moec", _version=1, _outputs=3,
        )  # fmt: skip
        return out


def _form(m: MoELayer) -> tuple[Any, ...]:
    """What decides on the pattern."""
    return m.transposed, m.interleaved, m.gated, m.activation, m.has_bias


def store_inputs(graph: ir.Graph, m: MoELayer) -> list[ir.Value]:
    """Blobs of the layer and the two dummies of a resident store."""
    return [
        graph_input(graph, f"moe.{m.layer}.experts"),
        add_initializer(graph, "moec.residency", np.zeros(1, np.int32)),
        add_initializer(graph, "moec.staging", np.zeros((1, 1), np.int8)),
    ]


def expert_attributes(m: MoELayer, context: RewriteContext) -> dict[str, Any]:
    """Attributes that Experts and PipelinedMoE share."""
    return dict(
        num_experts=m.num_experts,
        top_k=m.top_k,
        activation=m.activation,
        gated=int(m.gated),
        alpha=m.alpha,
        limit=m.limit,
        weight_format=context.experts,
        group_size=64,
        intermediate_size=m.intermediate_size,
        has_bias=int(m.has_bias),
        tile_layout="rows",
        horizon=0,
        num_slots=0,
        compute=context.compute,
        layer=m.layer,
        version=1,
    )


def describe(node: ir.Node, name: str) -> None:
    """Types and shapes of an Experts or PipelinedMoE node's outputs."""
    node.name = name
    sources = (node.inputs[0], *node.inputs[-2:])
    for value, source in zip(node.outputs, sources, strict=True):
        value.type, value.shape = source.type, source.shape


def lower_experts(model: ir.Model, context: RewriteContext, notes: list[str]) -> int:
    """Rewrites the experts of every MoE layer; their weights leave the graph.

    Raises:
        MoecError: A layer does not match.
    """
    forms = {_form(m): m for m in context.geometry.moe}
    for m in context.geometry.moe:
        blob = BlobLayout(context.experts, m.hidden_size, m.intermediate_size, m.gated, m.has_bias)
        shape = (m.num_experts, blob.blob_bytes)
        add_input(model.graph, f"moe.{m.layer}.experts", ir.DataType.INT8, shape)
    count = sum(ExpertsRule(context, notes, form).apply(model) for form in forms.values())
    found = {n.attributes["layer"].as_int(): n for n in model.graph if n.op_type == "Experts"}
    for m in context.geometry.moe:
        if m.layer not in found:
            why = [n for n in notes if n.startswith(f"experts of layer {m.layer}:")] or [
                "its form is not known"
            ]
            raise MoecError(f"experts of layer {m.layer} cannot be rewritten: {why[-1]}")
        describe(found[m.layer], f"experts.{m.layer}")
    return count
