"""Which reshapes around token-wise operators go, and which stay."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from moec.rewrite import run
from moec.rewrite.rank import drop_reshapes
from tests.helpers.captured import captured
from tests.rewrite.test_pipeline import context


def _value(name, *shape):
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))


def _node(op_type, inputs, *shape, **attributes):
    node = ir.node(op_type, inputs, attributes, outputs=[_value(f"{op_type}.{len(shape)}", *shape)])
    return node, node.outputs[0]


def _flattened(middle):
    """x -> Reshape -> middle(flat) -> Reshape, and what is left of it."""
    x, shape = _value("x", "b", "S", 8), ir.Value(name="shape", type=ir.TensorType(ir.DataType.INT64))
    back = ir.Value(name="back", type=ir.TensorType(ir.DataType.INT64))
    first, flat = _node("Reshape", [x, shape], "b*S", 8)
    nodes, y, initializers = middle(flat)
    last, out = _node("Reshape", [y, back], "b", "S", 8)
    graph = ir.Graph(
        [x, shape, back], [out], nodes=[first, *nodes, last], initializers=initializers,
        opset_imports={"": 24},
    )  # fmt: skip
    count = drop_reshapes(ir.Model(graph, ir_version=10))
    return count, x, nodes, graph.outputs[0]


def test_elementwise_operators_need_no_flattening():
    row = _value("row", 8)
    row.const_value = ir.tensor(np.ones(8, np.float32), name="row")

    def middle(flat):
        sigmoid, s = _node("Sigmoid", [flat], "b*S", 8)
        product, p = _node("Mul", [s, flat], "b*S", 8)
        total, t = _node("Add", [p, row], "b*S", 8)
        return [sigmoid, product, total], t, [row]

    count, x, (sigmoid, product, total), out = _flattened(middle)
    assert count == 2
    assert sigmoid.inputs[0] is x
    assert product.inputs[1] is x
    assert out is total.outputs[0]
    assert list(map(str, out.shape)) == ["b", "S", "8"]


@pytest.mark.parametrize("op_type", ["Softmax", "Transpose", "MatMul"])
def test_others_do(op_type):
    def middle(flat):
        inputs = [flat, flat] if op_type == "MatMul" else [flat]
        node, y = _node(op_type, inputs, "b*S", 8)
        return [node], y, []

    count, _, (node,), _ = _flattened(middle)
    assert count == 0
    assert node.inputs[0].producer().op_type == "Reshape"


def test_an_operand_from_outside_keeps_the_flattening():
    other = _value("other", "b*S", 8)

    def middle(flat):
        source, y = _node("Identity", [other], "b*S", 8)
        node, z = _node("Add", [flat, y], "b*S", 8)
        return [source, node], z, [other]

    assert _flattened(middle)[0] == 0


def test_attention_reads_joined_heads():
    model = captured("qwen2_moe").model.clone()
    run(model, context("qwen2_moe"))
    for node in model.graph:
        if node.op_type == "AsymKVAttention":
            assert [len(v.shape) for v in node.inputs[:3]] == [3, 3, 3]
        if node.op_type == "PipelinedMoE":
            assert len(node.inputs[0].shape) == 3


def test_graphs_that_stock_onnx_runtime_can_run_stay_so():
    model = captured("qwen2_moe").model.clone()
    run(model, context("qwen2_moe", weights="bf16"))
    assert not {"FusedLinear", "RotaryPair"} & {n.op_type for n in model.graph}
    moe = next(n for n in model.graph if n.op_type == "PipelinedMoE")
    assert len(moe.inputs[0].shape) == 2
