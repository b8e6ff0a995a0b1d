"""Rotary embeddings of an attention's queries and keys -> one moec::RotaryPair of the CPU backend."""

from __future__ import annotations

import onnx_ir as ir

from moec.rewrite.context import RewriteContext


def lower_rotary(model: ir.Model, context: RewriteContext, notes: list[str]) -> int:
    """Returns how many attentions got one; others keep RotaryEmbedding (partial, interleaved, shared).

    Graphs on bf16 weights have no operators but those with function bodies.
    """
    if context.weights == "bf16":
        return 0
    return sum(_join(node) for node in list(model.graph) if node.op_type == "AsymKVAttention")


def _join(attention: ir.Node) -> bool:
    pair = [attention.inputs[index].producer() for index in range(2)]
    if not all(_plain(node) for node in pair) or pair[0].inputs[1:] != pair[1].inputs[1:]:
        return False
    cos = pair[0].inputs[1]
    if any(_head_dim(node) != 2 * cos.shape[-1] for node in pair):
        return False
    old = [node.outputs[0] for node in pair]
    new = [ir.Value(name=v.name, type=v.type, shape=v.shape) for v in old]
    inputs = [pair[0].inputs[0], pair[1].inputs[0], *pair[0].inputs[1:]]
    node = ir.node("RotaryPair", inputs, domain="moec", version=1, outputs=new)
    attention.graph.insert_before(attention, node)
    for before, after in zip(old, new, strict=True):
        before.replace_all_uses_with(after)
    attention.graph.remove(pair, safe=True)
    return True


def _plain(node: ir.Node | None) -> bool:
    """Whole heads in `[b,S,heads*dim]`, halves side by side, read by nobody else."""
    if node is None or node.op_type != "RotaryEmbedding" or len(node.inputs) != 3:
        return False
    attributes = {name: a.value for name, a in node.attributes.items()}
    whole = not attributes.get("interleaved") and not attributes.get("rotary_embedding_dim")
    shape, cos = node.inputs[0].shape, node.inputs[1].shape
    flat = shape is not None and len(shape) == 3 and cos is not None and len(cos) == 3
    sole = len(list(node.outputs[0].uses())) == 1 and not node.outputs[0].is_graph_output()
    return whole and flat and sole and isinstance(shape[2], int) and isinstance(cos[2], int)


def _head_dim(node: ir.Node) -> int:
    return node.inputs[0].shape[2] // node.attributes["num_heads"].value
