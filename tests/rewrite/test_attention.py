"""The attention rule applies to what it means, and says why it does not apply to anything else."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from moec.errors import MoecError
from moec.rewrite.attention import lower_attention
from moec.rewrite.context import add_initializer
from tests.helpers.captured import captured
from tests.rewrite.test_pipeline import context


def _node(model: ir.Model, kind: str) -> ir.Node:
    return next(n for n in model.graph if n.op_type == kind)


def _refused(model: ir.Model, *words: str) -> None:
    with pytest.raises(MoecError) as info:
        lower_attention(model, context("qwen2_moe"), [])
    assert all(w in str(info.value) for w in ("attention layer 0", *words)), str(info.value)


def test_attributes_and_states():
    model, made = captured("gpt_oss").model.clone(), context("gpt_oss")
    assert lower_attention(model, made, []) == 2
    nodes = [n for n in model.graph if n.op_type == "AsymKVAttention"]
    windowed, full = (n.attributes for n in nodes)
    assert (windowed["window"].value, full["window"].value) == (8, 0)
    assert windowed["has_sink_logits"].value == 1
    assert nodes[0].inputs[12].name.endswith("sinks")
    assert (full["format"].value, full["promoted"].value) == ("mkv2", 16)
    shapes = {v.name: tuple(v.shape) for v in model.graph.inputs if v.name.startswith("kv.")}
    layout = made.layouts[1]
    assert shapes["kv.1.blocks"] == layout.blocks_shape(2)
    assert shapes["kv.1.ring"] == layout.ring_shape(2) == (2, 2, 144, 128)
    assert shapes["kv.0.ring"] == (2, 2, 8, 128)
    assert not any(n.endswith((".key", ".value")) for n in shapes)
    outputs = {o.name for o in model.graph.outputs}
    assert outputs == {"logits", *(f"kv.{i}.{s}.out" for i in (0, 1) for s in ("blocks", "ring"))}


def test_other_scale():
    model = captured("qwen2_moe").model.clone()
    _node(model, "Attention").attributes["scale"] = ir.AttrFloat32("scale", 0.5)
    _refused(model, "scale", "0.5")


def test_mask_that_is_not_causal():
    model = captured("qwen2_moe").model.clone()
    mask = _node(model, "LessOrEqual")
    negated = ir.Node("", "Not", [mask.outputs[0]])
    model.graph.insert_after(mask, negated)
    _node(model, "Attention").replace_input_with(3, negated.outputs[0])
    _refused(model, "causal")


def test_window_that_the_geometry_does_not_know():
    model = captured("gpt_oss").model.clone()
    limit = next(n for n in model.graph if n.op_type == "Greater").inputs[1].producer()
    limit.replace_input_with(1, add_initializer(model.graph, "five", np.array(5, np.int64)))
    with pytest.raises(MoecError, match="its window is 5, not 8"):
        lower_attention(model, context("gpt_oss"), [])


def test_tokens_written_elsewhere():
    model = captured("qwen2_moe").model.clone()
    scatter = _node(model, "TensorScatter")
    start = scatter.inputs[2].producer()
    start.replace_input_with(0, next(v for v in model.graph.inputs if v.name == "num_tokens"))
    _refused(model, "lengths[slot_ids]")


def test_layer_without_a_layout():
    made = context("qwen2_moe")
    del made.layouts[0]
    with pytest.raises(MoecError, match="attention layer 0"):
        lower_attention(captured("qwen2_moe").model.clone(), made, [])
