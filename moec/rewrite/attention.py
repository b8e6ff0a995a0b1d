"""TensorScatter + Attention over a slot's cache -> moec::AsymKVAttention over the quantized cache."""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.rewriter import pattern

from moec.bundle.geometry import AttentionLayer
from moec.errors import MoecError
from moec.reference.kv_layout import KVLayout
from moec.rewrite.context import (
    RewriteContext,
    Rule,
    add_initializer,
    add_input,
    attribute,
    graph_input,
    scalar,
)

ANY = pattern.ANY_VALUE


class AttentionRule(Rule):
    """The exported form of one attention layer; the flags choose its spelling."""

    def __init__(
        self,
        context: RewriteContext,
        notes: list[str],
        sinks: bool = False,
        softcap: bool = False,
        grouped: bool = False,
        scaled: bool = True,
    ) -> None:
        super().__init__(context, notes)
        self.sinks, self.softcap, self.grouped, self.scaled = sinks, softcap, grouped, scaled

    def pattern(self, op, q, k, v, past_k, past_v, slot_ids, start, mask):
        keys, values = self._rows(op, past_k, k, slot_ids, start), self._rows(op, past_v, v, slot_ids, start)
        if self.sinks or self.softcap:
            y = self._spelled_out(op, q, keys, values, mask)
        else:
            y = op.Attention(q, keys, values, mask, _allow_other_attributes=True, _outputs=["y"])
        return op.Transpose(y, perm=[0, 2, 1, 3])

    def _rows(self, op, past, new, slot_ids, start):
        rows = op.Concat(op.Gather(past, slot_ids, axis=0), new, axis=2)
        start = op.Cast(start, _allow_other_attributes=True)
        return op.TensorScatter(rows, new, start, axis=2, mode="linear")

    def _spelled_out(self, op, q, keys, values, mask):
        if self.grouped:
            keys, values = self._repeated(op, keys), self._repeated(op, values)
        s = op.MatMul(q, op.Transpose(keys, perm=[0, 1, 3, 2]))
        if self.scaled:
            s = op.Mul(s, pattern.Var("scale"))
        if self.softcap:
            s = op.Mul(op.Tanh(op.Div(s, pattern.Var("cap"))), pattern.Var("cap"))
        s = op.Where(mask, s, ANY)
        if not self.sinks:
            return op.MatMul(op.Softmax(s, axis=-1), values)
        sink = op.Expand(op.Reshape(pattern.Var("sinks"), ANY, _allow_other_attributes=True), ANY)
        p = op.Softmax(op.Concat(s, sink, axis=-1), axis=-1)
        return op.MatMul(op.Slice(p, ANY, ANY, ANY), values)

    def _repeated(self, op, x):
        return op.Reshape(op.Expand(op.Unsqueeze(x, ANY), ANY), ANY, _allow_other_attributes=True)

    def reason(self, q, k, v, past_k, past_v, slot_ids, start, mask, y=None, scale=None, cap=None, **_):
        layer = _layer_of(past_k)
        where, want = f"attention layer {layer}", self.context.attention(layer)
        if want is None or past_v.name != f"kv.{layer}.value":
            return where, f"its caches are {past_k.name} and {past_v.name}"
        if layer not in self.context.layouts:
            return where, "no KV layout was chosen for it"
        shapes = (q.shape[1], k.shape[1], q.shape[3], v.shape[3])
        if shapes != (want.num_heads, want.num_kv_heads, want.k_dim, want.v_dim):
            return where, f"heads and dimensions are {shapes}"
        found_scale = attribute(y, "scale") if y is not None else scalar(scale) if self.scaled else 1.0
        if found_scale is None or not np.isclose(found_scale, want.scale, rtol=self.context.tolerance):
            return where, f"scale is {found_scale}, not {want.scale}"
        same_cap = np.isclose(scalar(cap) or 0.0, want.softcap, rtol=self.context.tolerance)
        if not same_cap or self.sinks != want.has_sink_logits:
            return where, "soft cap or sink logits differ from the geometry"
        why = _rows_reason(slot_ids, start) or _mask_reason(mask, want.window)
        return (where, why) if why else None

    def rewrite(self, op, q, k, v, past_k, slot_ids, sinks=None, **_):
        layer = _layer_of(past_k)
        want, layout = self.context.attention(layer), self.context.layouts[layer]
        graph = past_k.graph
        if sinks is None:
            sinks = add_initializer(
                graph, f"moec.zeros.{want.num_heads}", np.zeros(want.num_heads, np.float32)
            )
        state = [graph_input(graph, f"kv.{layer}.{n}") for n in ("blocks", "ring")]
        rows = [slot_ids, graph_input(graph, "lengths"), graph_input(graph, "num_tokens")]
        calibration = [graph_input(graph, f"kv.{layer}.{n}") for n in ("k_mean", "k_ref", "k_order", "v_ref")]
        qkv = [op.Transpose(x, perm=[0, 2, 1, 3]) for x in (q, k, v)]
        out, *_ = op.AsymKVAttention(
            *qkv, *state, *rows, *calibration, sinks,
            **_attributes(want, layout), _domain="moec", _version=1,
            _outputs=[f"attention.{layer}.out", f"kv.{layer}.blocks.out", f"kv.{layer}.ring.out"],
        )  # fmt: skip
        return op.Reshape(out, op.Constant(value_ints=[0, 0, want.num_heads, want.v_dim]))


def _attributes(a: AttentionLayer, layout: KVLayout) -> dict[str, Any]:
    """Attributes of the operator for one layer."""
    return dict(
        scale=a.scale,
        window=layout.window,
        softcap=a.softcap,
        has_sink_logits=int(a.has_sink_logits),
        format=layout.format,
        block_tokens=layout.block_tokens,
        promoted=layout.promoted,
        sink_tokens=layout.sink_tokens,
        recent_tokens=layout.recent_tokens,
        rollback_tokens=layout.rollback_tokens,
        layout="rows",
        version=1,
        layer=a.layer,
    )


def _layer_of(past_k: ir.Value) -> int:
    parts = (past_k.name or "").split(".")
    return int(parts[1]) if len(parts) == 3 and parts[0] == "kv" and parts[1].isdigit() else -1


def _op(value: ir.Value | None, *kinds: str) -> ir.Node | None:
    node = None if value is None else value.producer()
    return node if node is not None and node.op_type in kinds else None


def _through_cast(value: ir.Value | None) -> ir.Value | None:
    while (node := _op(value, "Cast")) is not None:
        value = node.inputs[0]
    return value


def _rows_reason(slot_ids: ir.Value, start: ir.Value) -> str | None:
    """The rows are the graph's slots, and new tokens go where each slot ends."""
    if slot_ids.name != "slot_ids":
        return f"its slots are {slot_ids.name}, not slot_ids"
    gather = _op(_through_cast(start), "Gather")
    if gather is None or gather.inputs[0].name != "lengths" or _origin(gather.inputs[1]) != "slot_ids":
        return "its tokens are not written at lengths[slot_ids]"
    return None


def _origin(value: ir.Value | None) -> str | None:
    """Name of what a value is a cast or a reshape of."""
    while (node := _op(value, "Cast", "Reshape", "Unsqueeze")) is not None:
        value = node.inputs[0]
    return value.name if value is not None else None


def _mask_reason(mask: ir.Value, window: int) -> str | None:
    """The mask is `key <= position` and, with a window, `key > position - window`."""
    both = _op(mask, "And")
    causal = _op(both.inputs[0] if both else mask, "LessOrEqual")
    if causal is None:
        return "its mask is not causal"
    position = _op(causal.inputs[1], "Unsqueeze")
    if position is None or not _is_position(position.inputs[0]):
        return "its mask does not compare with the tokens' positions"
    found = _window(both, causal) if both else 0
    return None if found == window else f"its window is {found}, not {window}"


def _is_position(value: ir.Value) -> bool:
    """lengths[slot_ids] + 0, 1, 2, ..."""
    add = _op(value, "Add")
    if add is None or _op(add.inputs[1], "Range") is None:
        return False
    gather = _op(_strip(add.inputs[0]), "Gather")
    return gather is not None and gather.inputs[0].name == "lengths"


def _strip(value: ir.Value) -> ir.Value:
    while (node := _op(value, "Cast", "Unsqueeze")) is not None:
        value = node.inputs[0]
    return value


def _window(both: ir.Node, causal: ir.Node) -> int | None:
    greater = _op(both.inputs[1], "Greater")
    sub = _op(greater.inputs[1], "Sub") if greater else None
    if sub is None or greater.inputs[0] is not causal.inputs[0] or sub.inputs[0] is not causal.inputs[1]:
        return None
    return scalar(sub.inputs[1])


def lower_attention(model: ir.Model, context: RewriteContext, notes: list[str]) -> int:
    """Rewrites every attention layer and exchanges the caches among the graph's inputs and outputs.

    Raises:
        MoecError: A layer does not match: its cache could not be quantized.
    """
    batch = _batch(model.graph)
    for a in context.geometry.attention:
        if a.layer in context.layouts:
            _add_state(model.graph, a, context.layouts[a.layer], batch)
    forms = [(False, False, False), *(f for f in product((False, True), repeat=4) if f[0] or f[1])]
    count = sum(AttentionRule(context, notes, *form).apply(model) for form in forms)
    _exchange_caches(model, context, notes)
    return count


def _batch(graph: ir.Graph) -> int:
    return graph_input(graph, "lengths").shape[0]


def _add_state(graph: ir.Graph, a: AttentionLayer, layout: KVLayout, batch: int) -> None:
    name, heads = f"kv.{a.layer}.", (a.num_kv_heads, a.k_dim)
    ring = ir.DataType.from_numpy(layout.ring_dtype)
    add_input(graph, name + "blocks", ir.DataType.INT8, layout.blocks_shape(batch))
    add_input(graph, name + "ring", ring, layout.ring_shape(batch))
    add_input(graph, name + "k_mean", ir.DataType.FLOAT, heads)
    add_input(graph, name + "k_ref", ir.DataType.FLOAT, heads)
    add_input(graph, name + "k_order", ir.DataType.INT32, heads)
    add_input(graph, name + "v_ref", ir.DataType.FLOAT, (a.num_kv_heads, layout.num_v_groups))


def _exchange_caches(model: ir.Model, context: RewriteContext, notes: list[str]) -> None:
    graph = model.graph
    nodes = {n.attributes["layer"].as_int(): n for n in graph if n.op_type == "AsymKVAttention"}
    outputs = [o for o in graph.outputs if not o.name.startswith("kv.")]
    for a in context.geometry.attention:
        if a.layer not in nodes:
            why = [n for n in notes if n.startswith(f"attention layer {a.layer}:")] or [
                "its form is not known"
            ]
            raise MoecError(
                f"attention layer {a.layer} cannot be rewritten: {why[-1].partition(': ')[2] or why[-1]}"
            )
        node = nodes[a.layer]
        _describe(node, a, graph)
        outputs += node.outputs[1:]
    graph.outputs[:] = outputs
    for value in list(graph.inputs):
        if value.name.endswith((".key", ".value")) and value.name.startswith("kv."):
            graph.inputs.remove(value)


def _describe(node: ir.Node, a: AttentionLayer, graph: ir.Graph) -> None:
    """Types, shapes and names of the new node's outputs and of the transposed q, k, v."""
    node.name = f"attention.{a.layer}"
    out, blocks, ring = node.outputs
    out.type, out.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(("b", "S", a.num_heads * a.v_dim))
    for value, state in ((blocks, node.inputs[3]), (ring, node.inputs[4])):
        value.type, value.shape, value.name = state.type, state.shape, state.name + ".out"
    dims = ((a.num_heads, a.k_dim), (a.num_kv_heads, a.k_dim), (a.num_kv_heads, a.v_dim))
    for value, (heads, dim) in zip(node.inputs[:3], dims, strict=True):
        value.type, value.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(("b", "S", heads, dim))
