"""Joins dense layers of the CPU graph with what surrounds them, so that a token runs fewer nodes.

Gate, up and activation become one node, as do layers that read one tensor. Norms join the products that read
them, gates and residual sums those that they are applied to. Each step is local; values that stay keep their
names.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import onnx_ir as ir

from moec.frontend.simplify import same_known_shape
from moec.rewrite.context import RewriteContext
from moec.rewrite.linear import NAME, Linear, read


def lower_fused(model: ir.Model, context: RewriteContext, notes: list[str]) -> int:
    """Applies each step until nothing more joins; returns how many nodes it took away."""
    before = len(model.graph)
    for step in (fuse_activation, fuse_gate, fuse_addend):
        for node in list(_linears(model.graph)):
            while node is not None and node.graph is not None:
                node = step(node)
    join_same_input(model.graph)
    for node in [n for n in model.graph if n.op_type == "RMSNormalization"]:
        fuse_norm(node)
    return before - len(model.graph)


def _linears(graph: ir.Graph) -> Iterator[ir.Node]:
    return (node for node in graph if node.domain == "moec" and node.op_type == NAME)


def _is_linear(node: ir.Node | None) -> bool:
    return node is not None and node.domain == "moec" and node.op_type == NAME


def _sole_user(value: ir.Value, op_type: str) -> ir.Node | None:
    """The node of that type that is the value's only use, itself used."""
    uses = list(value.uses())
    if len(uses) != 1 or value.is_graph_output() or uses[0].node.op_type != op_type:
        return None
    return uses[0].node


def _other(node: ir.Node, value: ir.Value) -> ir.Value | None:
    """The second operand of a commutative node."""
    a, b = node.inputs
    return b if a is value else a


def _replace(old: ir.Node, linear: Linear, *gone: ir.Node) -> ir.Node:
    """Puts `linear` in the place of `old`, whose outputs it takes over; removes what nobody uses now."""
    outputs = [ir.Value(name=v.name, type=v.type, shape=v.shape) for v in old.outputs]
    node, graph = linear.node(outputs), old.graph
    graph.insert_before(old, node)
    for before, after in zip(old.outputs, outputs, strict=True):
        before.replace_all_uses_with(after, replace_graph_outputs=True)
    for dead in (old, *gone):
        graph.remove(dead, safe=True)
    return node


def fuse_activation(node: ir.Node) -> ir.Node | None:
    """act(x G) * (x U) -> one node; `node` is the gate projection."""
    linear = read(node)
    if linear.activation != "none" or not linear.plain or len(linear.matrices) != 1:
        return None
    found = _activated(node.outputs[0])
    if found is None:
        return None
    value, activation, inner = found
    product = _sole_user(value, "Mul")
    up = _other(product, value).producer() if product is not None else None
    if not _is_linear(up) or up is node or _sole_user(up.outputs[0], "Mul") is not product:
        return None
    second = read(up)
    fits = second.x is linear.x and second.plain and second.activation == "none" and len(second.matrices) == 1
    if not fits or linear.rows(0) != second.rows(0):
        return None
    joined = Linear(linear.x, [*linear.matrices, *second.matrices], activation)
    return _replace(product, joined, *inner, up, node)


def _activated(y: ir.Value) -> tuple[ir.Value, str, list[ir.Node]] | None:
    """(act(y), its name, its nodes, last first) where y is used for nothing else."""
    uses = [use.node for use in y.uses()]
    if y.is_graph_output():
        return None
    if len(uses) == 1 and (name := _ACTIVATIONS.get(uses[0].op_type, lambda node: None)(uses[0])):
        return uses[0].outputs[0], name, uses
    sigmoid = next((n for n in uses if n.op_type == "Sigmoid"), None)
    product = next((n for n in uses if n.op_type == "Mul"), None)
    if len(uses) != 2 or sigmoid is None or product is None:
        return None
    if _sole_user(sigmoid.outputs[0], "Mul") is not product:
        return None
    return product.outputs[0], "silu", [product, sigmoid]


def _swish(node: ir.Node) -> str | None:
    alpha = node.attributes.get("alpha")
    return "silu" if alpha is None or alpha.value == 1.0 else None


def _gelu(node: ir.Node) -> str:
    approximate = node.attributes.get("approximate")
    return "gelu_tanh" if approximate is not None and approximate.value == "tanh" else "gelu"


_ACTIVATIONS: dict[str, Callable[[ir.Node], str | None]] = {"Swish": _swish, "Gelu": _gelu}


def fuse_gate(node: ir.Node) -> ir.Node | None:
    """y * Sigmoid(g `[..., 1]`) -> one node."""
    linear = read(node)
    product = _sole_user(node.outputs[0], "Mul")
    if product is None or len(node.outputs) != 1 or not linear.plain:
        return None
    sigmoid = _other(product, node.outputs[0]).producer()
    if sigmoid is None or sigmoid.op_type != "Sigmoid":
        return None
    gate, y = sigmoid.inputs[0], product.outputs[0]
    if not _one_each(gate, y) or _sole_user(sigmoid.outputs[0], "Mul") is not product:
        return None
    return _replace(product, Linear(linear.x, linear.matrices, linear.activation, gate), sigmoid, node)


def _one_each(gate: ir.Value, y: ir.Value) -> bool:
    """Whether `gate` has y's shape with 1 in place of the last dimension."""
    if gate.shape is None or y.shape is None or len(gate.shape) != len(y.shape):
        return False
    same = all(a == b and not _unknown(a) for a, b in zip(gate.shape[:-1], y.shape[:-1], strict=True))
    return same and gate.shape[-1] == 1


def _unknown(dim: int | ir.SymbolicDim) -> bool:
    return isinstance(dim, ir.SymbolicDim) and dim.value is None


def fuse_addend(node: ir.Node) -> ir.Node | None:
    """y + r, of one shape -> one node."""
    linear = read(node)
    total = _sole_user(node.outputs[0], "Add")
    if total is None or len(node.outputs) != 1:
        return None
    addend = _other(total, node.outputs[0])
    if addend is node.outputs[0] or not same_known_shape(addend.shape, total.outputs[0].shape):
        return None
    if not same_known_shape(node.outputs[0].shape, total.outputs[0].shape):
        return None
    addends = (*linear.addends, addend)
    return _replace(total, Linear(linear.x, linear.matrices, linear.activation, linear.gate, addends), node)


def join_same_input(graph: ir.Graph) -> None:
    """One node for all that read one tensor and nothing that is computed beside it."""
    groups: dict[ir.Value, list[ir.Node]] = {}
    for node in _linears(graph):
        if read(node).plain:
            groups.setdefault(node.inputs[0], []).append(node)
    for nodes in groups.values():
        _join(graph, nodes)


def _join(graph: ir.Graph, nodes: list[ir.Node]) -> None:
    """The first may have an activation; one more with an activation stays alone."""
    active = [n for n in nodes if read(n).activation != "none"]
    nodes = active[:1] + [n for n in nodes if n not in active]
    if len(nodes) < 2:
        return
    parts = [read(n) for n in nodes]
    matrices = [matrix for part in parts for matrix in part.matrices]
    old = [v for n in nodes for v in n.outputs]
    new = [ir.Value(name=v.name, type=v.type, shape=v.shape) for v in old]
    first = next(n for n in graph if n in nodes)
    graph.insert_before(first, Linear(parts[0].x, matrices, parts[0].activation).node(new))
    for before, after in zip(old, new, strict=True):
        before.replace_all_uses_with(after, replace_graph_outputs=True)
    graph.remove(nodes, safe=True)


def fuse_norm(norm: ir.Node) -> None:
    """RMSNormalization(x) read by one node of products -> that node, which also gives the normalized x if
    something else reads it."""
    y = norm.outputs[0]
    readers = [u.node for u in y.uses() if _is_linear(u.node) and u.idx == 0 and read(u.node).plain]
    if len(readers) != 1 or not _over_last_axis(norm):
        return
    linear, old = read(readers[0]), readers[0]
    linear.x, linear.norm, linear.epsilon = norm.inputs[0], norm.inputs[1], _epsilon(norm)
    linear.keep = len(list(y.uses())) > 1 or y.is_graph_output()
    outputs = [*old.outputs, *([y] if linear.keep else [])]
    new = [ir.Value(name=v.name, type=v.type, shape=v.shape) for v in outputs]
    norm.graph.insert_before(norm, linear.node(new))
    for before, after in zip(outputs, new, strict=True):
        before.replace_all_uses_with(after, replace_graph_outputs=True)
    norm.graph.remove([old, norm], safe=True)


def _over_last_axis(norm: ir.Node) -> bool:
    """Whether the norm is over the last axis, in fp32, with a weight of that size."""
    x, weight, axis = norm.inputs[0], norm.inputs[1], norm.attributes.get("axis")
    last = axis is None or axis.value in (-1, len(x.shape or ()) - 1)
    sizes = weight.shape is not None and len(weight.shape) == 1 and x.shape is not None
    return last and x.dtype == ir.DataType.FLOAT and sizes and weight.shape[0] == x.shape[-1]


def _epsilon(norm: ir.Node) -> float:
    """1e-5 is the operator's default."""
    return norm.attributes["epsilon"].value if "epsilon" in norm.attributes else 1e-5
