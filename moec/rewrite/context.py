"""What the rules may look up, and how they say why they did not apply."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir
from onnxscript.rewriter import pattern

from moec.bundle.geometry import AttentionLayer, Geometry, MoELayer
from moec.reference.kv_layout import KVLayout


@dataclass
class RewriteContext:
    """Choices of a build that the rewrite follows.

    Attributes:
        geometry: From the capture.
        layouts: KV layout of each attention layer, by layer index.
        weights: Dense weights: int4 | bf16.
        experts: Expert blobs: int4 | bf16.
        compute: Activations in the experts' products: int8 | fp32.
        tolerance: Largest relative difference between constants of the graph and of the geometry; `widen`
            raises it for graphs whose constants are rounded.
        keep_float: Parameters that stay fp32; rules add to it (routers that stay in standard operators).
    """

    geometry: Geometry
    layouts: Mapping[int, KVLayout]
    weights: str = "int4"
    experts: str = "int4"
    compute: str = "int8"
    tolerance: float = 1e-5
    keep_float: set[str] = field(default_factory=set)

    def attention(self, layer: int) -> AttentionLayer | None:
        """The attention layer with that index."""
        return next((a for a in self.geometry.attention if a.layer == layer), None)

    def moe_by_weight(self, name: str | None) -> MoELayer | None:
        """The MoE layer whose first projection is called `name`."""
        return next((m for m in self.geometry.moe if m.gate_up == name), None)


OTHER = ("", "something else")
"""What `Rule.reason` returns for matches that are simply not meant; they leave no note."""


class Rule(pattern.RewriteRuleClassBase):
    """A rewrite rule with a context: `reason` returns None where it applies, else where and why not.

    Subclasses define `pattern`, `reason` and `rewrite`; `notes` collects "where: reason".
    """

    def __init__(self, context: RewriteContext, notes: list[str], name: str | None = None) -> None:
        super().__init__(name or type(self).__name__, remove_nodes=False)
        self.context, self.notes = context, notes

    def reason(self, **values: Any) -> tuple[str, str] | None:
        """(where, why not), or None."""
        raise NotImplementedError

    def apply(self, model: ir.Model) -> int:
        """Rewrites every match; returns their number."""
        rule = pattern.RewriteRule(
            self.pattern, self.rewrite, self.check, name=self.name, remove_nodes=self.remove_nodes
        )
        return pattern.RewriteRuleSet([rule]).apply_to_model(model)

    def check(self, context: Any, **values: Any) -> pattern.MatchResult:
        result = pattern.MatchResult()
        why = self.reason(**values)
        if why is not None:
            result.fail(why[1])
            if why is not OTHER:
                self.notes.append(": ".join(why))
        return result


def scalar(value: ir.Value | None) -> float | int | None:
    """The number in a constant of one element, else None."""
    if value is None or value.const_value is None or value.const_value.size != 1:
        return None
    return value.const_value.numpy().reshape(()).item()


def attribute(value: ir.Value, name: str) -> Any:
    """Attribute of the node that makes `value`."""
    return value.producer().attributes[name].value


def graph_input(graph: ir.Graph, name: str) -> ir.Value:
    """The graph input called `name`."""
    return next(v for v in graph.inputs if v.name == name)


def add_input(graph: ir.Graph, name: str, dtype: ir.DataType, shape: tuple[Any, ...]) -> ir.Value:
    """A new graph input, or the one of that name that is there."""
    for value in graph.inputs:
        if value.name == name:
            return value
    value = ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))
    graph.inputs.append(value)
    return value


def add_initializer(graph: ir.Graph, name: str, array: Any) -> ir.Value:
    """A small constant with a name, shared by all who ask for the same name."""
    if name in graph.initializers:
        return graph.initializers[name]
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=tensor.shape)
    graph.initializers.add(value)
    return value
