"""Drops reshapes around operators of the CPU backend that take tensors of either rank.

Experts and dense layers work token by token: `[b,S,H]` needs no flattening to `[b*S,H]`. Attention finds the
heads in `[b,S,heads*dim]` by the shape of its cache.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import onnx_ir as ir

from moec.frontend.simplify import same_known_shape
from moec.rewrite.context import RewriteContext

_BY_TOKEN = {("moec", "FusedLinear"), ("moec", "PipelinedMoE"), ("", "Sigmoid"), ("", "Swish"), ("", "Gelu")}
_ELEMENTWISE = {"Add", "Mul", "Sub", "Div"}


def lower_rank(model: ir.Model, context: RewriteContext, notes: list[str]) -> int:
    """Returns how many reshapes are not needed any more.

    Graphs on bf16 weights keep theirs: stock ONNX Runtime runs their function bodies, which know one rank.
    """
    return drop_reshapes(model) if context.weights != "bf16" else 0


def drop_reshapes(model: ir.Model) -> int:
    """Drops them whatever the weights are."""
    count = sum(_split_heads(node) for node in model.graph if node.op_type == "AsymKVAttention")
    for node in list(model.graph):
        region = _flattened(node)
        if region is not None:
            count += 1 + len(region.exits)
            region.rewire()
    return count


def _split_heads(attention: ir.Node) -> int:
    """Lets q, k and v stay `[b,S,heads*dim]`."""
    dropped = 0
    for index in range(3):
        reshape = attention.inputs[index].producer()
        if reshape is None or reshape.op_type != "Reshape":
            continue
        joined, split = reshape.inputs[0].shape, reshape.outputs[0].shape
        if joined is None or len(joined) != 3 or not _static(*split[2:]):
            continue
        if same_known_shape(ir.Shape(joined[:2]), ir.Shape(split[:2])) and joined[2] == split[2] * split[3]:
            attention.replace_input_with(index, reshape.inputs[0])
            dropped += 1
    return dropped


@dataclass
class _Region:
    """What works token by token between a flattening reshape and those that undo it."""

    entry: ir.Node
    values: list[ir.Value] = field(default_factory=list)
    exits: list[ir.Node] = field(default_factory=list)

    def rewire(self) -> None:
        x = self.entry.inputs[0]
        self.entry.outputs[0].replace_all_uses_with(x)
        for value in self.values:
            value.shape = ir.Shape([*x.shape[:2], value.shape[-1]])
        for node in self.exits:
            node.outputs[0].replace_all_uses_with(node.inputs[0], replace_graph_outputs=True)


def _flattened(entry: ir.Node) -> _Region | None:
    """The region behind a Reshape `[b,S,H]` -> `[b*S,H]`; None if something in it needs two dimensions."""
    if entry.op_type != "Reshape" or entry.domain:
        return None
    before, after = entry.inputs[0].shape, entry.outputs[0].shape
    if before is None or after is None or (len(before), len(after)) != (3, 2) or before[2] != after[1]:
        return None
    region, inside, todo = _Region(entry), {entry.outputs[0]}, [entry.outputs[0]]
    while todo:
        value = todo.pop()
        if value.is_graph_output():
            return None
        for use in value.uses():
            if _undoes(use.node, before):
                region.exits += [use.node] if use.node not in region.exits else []
            elif not _by_token(use.node, use.idx):
                return None
            else:
                new = [v for v in _results(use.node) if v not in inside]
                inside.update(new)
                region.values += new
                todo += new
    return region if all(_closed(v.producer(), inside) for v in region.values) else None


def _undoes(node: ir.Node, flattened: ir.Shape) -> bool:
    given, out = node.inputs[0], node.outputs[0]
    if node.op_type != "Reshape" or node.domain or out.shape is None or len(out.shape) != 3:
        return False
    same = same_known_shape(ir.Shape(out.shape[:2]), ir.Shape(flattened[:2]))
    return same and _static(out.shape[2]) and given.shape is not None and given.shape[-1] == out.shape[2]


def _by_token(node: ir.Node, index: int) -> bool:
    if (node.domain, node.op_type) in _BY_TOKEN:
        return index == 0
    return not node.domain and node.op_type in _ELEMENTWISE


def _results(node: ir.Node) -> list[ir.Value]:
    """Outputs with a row per token."""
    return node.outputs[:1] if node.op_type == "PipelinedMoE" else list(node.outputs)


def _closed(node: ir.Node, inside: set[ir.Value]) -> bool:
    """Whether elementwise operands from outside broadcast over tokens, whatever the rank."""
    if node.domain or node.op_type not in _ELEMENTWISE:
        return True
    return all(v in inside or (v.is_initializer() and _row(v)) for v in node.inputs)


def _row(value: ir.Value) -> bool:
    shape = value.shape
    return shape is not None and (len(shape) < 2 or (len(shape) == 2 and shape[0] == 1))


def _static(*dims: int | ir.SymbolicDim) -> bool:
    return all(isinstance(dim, int) for dim in dims)
