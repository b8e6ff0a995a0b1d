from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto, helper

from moec.dialect.functions import attach, functions_for
from moec.errors import MoecError
from moec.reference.attention import asym_kv_attention
from moec.reference.kv_cache import KVLayout
from tests.helpers.attention_case import AttentionCase
from tests.helpers.moe_case import moe_attributes, moe_inputs
from tests.helpers.rng import fresh_rng
from tests.helpers.single_op import single_op_model, stock_session


def two_layer_model(second: dict) -> tuple[onnx.ModelProto, AttentionCase, dict]:
    """Two attention nodes on the same inputs; the second with changed attributes."""
    case = AttentionCase(fresh_rng(), KVLayout("mkv2", 1, 64, 64, 200), 2, layer=0)
    inputs = case.inputs(*case.tokens(1, 4), slots=[0], counts=[4])
    model = single_op_model("AsymKVAttention", inputs, case.attributes)
    node = onnx.NodeProto()
    node.CopyFrom(model.graph.node[0])
    node.name = "second"
    del node.attribute[:], node.output[:]
    node.attribute.extend(helper.make_node("x", [], [], **(case.attributes | second)).attribute)
    node.output.extend(["out2", "blocks2", "ring2"])
    model.graph.node.append(node)
    model.graph.output.append(helper.make_tensor_value_info("out2", TensorProto.FLOAT, ["b", "S", 128]))
    return model, case, inputs


def test_layers_that_differ_in_their_number_share_a_function():
    model, _, _ = two_layer_model({"layer": 1})
    (function,) = functions_for(model)
    assert {node.overload for node in model.graph.node} == {function.overload}
    assert function.overload.startswith("mkv2_h2x1_d64x64_")
    assert not model.functions


def test_layers_that_differ_have_their_own():
    model, case, inputs = two_layer_model({"layer": 1, "scale": 0.5})
    attach(model)
    assert len(model.functions) == 2
    out = stock_session(model).run(["out", "out2"], inputs)
    for got, scale in zip(out, (case.attributes["scale"], 0.5), strict=True):
        want = asym_kv_attention(**inputs, **(case.attributes | {"scale": scale}))[0]
        assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("op", ["AsymKVAttention", "PipelinedMoE"])
def test_models_with_functions_pass_the_full_checker(op):
    if op == "PipelinedMoE":
        attributes = moe_attributes()
        model = single_op_model(op, moe_inputs(fresh_rng(), attributes, [1], 1), attributes)
    else:
        model, _, _ = two_layer_model({"layer": 1})
    onnx.checker.check_model(attach(model), full_check=True)


def test_ir_models():
    model, _, inputs = two_layer_model({"layer": 1})
    other = ir.serde.deserialize_model(model)
    attach(other)
    attach(model)
    assert [node.overload for node in other.graph] == [node.overload for node in model.graph.node]
    assert len(other.functions) == 1
    a, b = (stock_session(m).run(None, inputs) for m in (model, ir.serde.serialize_model(other)))
    for x, y in zip(a, b, strict=True):
        assert np.array_equal(x, y)


def test_unknown_shapes_and_operators_are_refused():
    model, _, _ = two_layer_model({})
    for value in model.graph.input:
        if value.name == "ring":
            value.type.tensor_type.ClearField("shape")
    with pytest.raises(MoecError, match=r"shape of input ring is unknown .*AsymKVAttention"):
        functions_for(model)
    model.graph.node[0].op_type = "Softmax"
    with pytest.raises(MoecError, match="no operator moec::Softmax"):
        functions_for(model)


def test_pools_of_slots_have_no_function():
    attributes = moe_attributes(num_slots=4)
    model = single_op_model("PipelinedMoE", moe_inputs(fresh_rng(), attributes, [1], 1), attributes)
    with pytest.raises(MoecError, match="4 slots"):
        functions_for(model)
