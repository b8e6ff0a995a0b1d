from __future__ import annotations

import onnx
import pytest

from moec.dialect.schemas import DOMAIN, OPS, VERSION, register
from moec.reference.kv_cache import KVLayout
from tests.helpers.attention_case import AttentionCase
from tests.helpers.moe_case import moe_attributes, moe_inputs
from tests.helpers.rng import fresh_rng
from tests.helpers.single_op import single_op_model


@pytest.fixture(autouse=True)
def registered():
    register()
    register()


def attention_model() -> onnx.ModelProto:
    case = AttentionCase(fresh_rng(), KVLayout("mkv2", 2, 64, 32, 400), 6)
    inputs = case.inputs(*case.tokens(1, 1), slots=[0], counts=[1])
    return single_op_model("AsymKVAttention", inputs, case.attributes)


def moe_model() -> onnx.ModelProto:
    attributes = moe_attributes()
    return single_op_model("PipelinedMoE", moe_inputs(fresh_rng(), attributes, [1], 1), attributes)


@pytest.mark.parametrize("name", OPS)
def test_schemas_say_what_is_declared(name):
    schema, op = onnx.defs.get_schema(name, VERSION, DOMAIN), OPS[name]
    assert [i.name for i in schema.inputs] == [t.name for t in op.inputs]
    assert [o.name for o in schema.outputs] == [t.name for t in op.outputs]
    assert schema.min_input == schema.max_input == len(op.inputs)
    assert {n: a.required for n, a in schema.attributes.items()} == {
        a.name: a.default is None for a in op.attributes
    }
    for attribute in op.attributes:
        if attribute.default is not None:
            default = onnx.helper.get_attribute_value(schema.attributes[attribute.name].default_value)
            default = default.decode() if isinstance(default, bytes) else default
            assert default == attribute.default


@pytest.mark.parametrize("make", [attention_model, moe_model])
def test_full_checker_accepts_nodes(make):
    onnx.checker.check_model(make(), full_check=True)


def test_output_shapes_are_inferred():
    model = attention_model()
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    inferred = onnx.shape_inference.infer_shapes(model, strict_mode=True, check_type=True)
    dims = [[d.dim_value or d.dim_param for d in o.type.tensor_type.shape.dim] for o in inferred.graph.output]
    assert dims == [["b", "S", 192], [3, 2, 5, 2048], [3, 2, 144, 96]]


def test_a_missing_attribute_fails_the_checker():
    model = attention_model()
    kept = [a for a in model.graph.node[0].attribute if a.name != "format"]
    del model.graph.node[0].attribute[:]
    model.graph.node[0].attribute.extend(kept)
    with pytest.raises(onnx.checker.ValidationError, match="format"):
        onnx.checker.check_model(model)
