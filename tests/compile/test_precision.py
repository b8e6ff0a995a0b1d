"""Which nodes compute in the activation type, and which in float32."""

import numpy as np
import onnx
import onnx_ir as ir
import pytest

from moec.compile.precision import ActivationType
from moec.errors import MoecError

F16, F32 = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT


def graph(nodes, inputs, outputs=("y",)):
    """A typed model: `inputs` maps names to (type, shape)."""
    values = [onnx.helper.make_tensor_value_info(name, *kind) for name, kind in inputs.items()]
    results = [onnx.helper.make_tensor_value_info(name, F32, None) for name in outputs]
    made = onnx.helper.make_graph(nodes, "g", values, results)
    return ir.from_proto(onnx.helper.make_model(made, opset_imports=[onnx.helper.make_opsetid("", 24)]))


def node(op, inputs, output, **attributes):
    return onnx.helper.make_node(op, inputs, [output], name=output, **attributes)


def types(model):
    ActivationType(model.graph, ir.DataType.FLOAT16).run()
    return {value.name: value.dtype.name for n in model.graph for value in n.outputs}


def test_an_activation_pulls_constants_to_its_type():
    model = graph(
        [node("Mul", ["x", "c"], "z"), node("Add", ["z", "c"], "y")], {"x": (F16, [2]), "c": (F32, [2])}
    )
    found = types(model)
    assert found["z"] == "FLOAT16"
    assert [n.op_type for n in model.graph].count("Cast") == 2  # c once, the output back once
    assert found["y"] == "FLOAT"
    assert model.graph.outputs[0].name == "y"


def test_what_no_weight_touches_stays_float32():
    found = types(
        graph(
            [node("Cos", ["angle"], "c"), node("Mul", ["x", "c"], "y")],
            {"x": (F16, [2]), "angle": (F32, [2])},
        )
    )
    assert found["c"] == "FLOAT"


def test_reductions_of_activations_run_in_float32_until_the_next_activation():
    nodes = [
        node("Pow", ["x", "two"], "square"),
        node("ReduceMean", ["square"], "mean"),
        node("Sqrt", ["mean"], "root"),
        node("Div", ["x", "root"], "y"),
    ]
    found = types(graph(nodes, {"x": (F16, [2, 8]), "two": (F32, [])}))
    assert found["square"] == found["mean"] == found["root"] == "FLOAT"
    assert found["y.float16"] == "FLOAT16"


def test_a_router_in_standard_operators_stays_float32():
    nodes = [
        node("Transpose", ["gate"], "t", perm=[1, 0]),
        node("MatMul", ["x", "t"], "logits"),
        node("Softmax", ["logits"], "y"),
    ]
    found = types(graph(nodes, {"x": (F16, [2, 8]), "gate": (F32, [4, 8])}))
    assert found["logits"] == found["y"] == "FLOAT"


def test_a_cast_to_float32_is_taken_back():
    found = types(graph([node("Cast", ["x"], "f", to=F32), node("Neg", ["f"], "y")], {"x": (F16, [2])}))
    assert found["f"] == "FLOAT16"


def test_comparisons_and_shapes_keep_their_types():
    nodes = [
        node("Shape", ["x"], "shape"),
        node("Less", ["x", "c"], "small"),
        node("Where", ["small", "x", "c"], "w"),
        node("Reshape", ["w", "shape"], "y"),
    ]
    found = types(graph(nodes, {"x": (F16, [2]), "c": (F32, [2])}))
    assert (found["shape"], found["small"], found["w"]) == ("INT64", "BOOL", "FLOAT16")


def test_an_unknown_moec_op_is_refused():
    bad = onnx.helper.make_node("Sampler", ["x"], ["y"], name="sampler_0", domain="moec")
    with pytest.raises(MoecError, match="no TensorRT plugin for moec::Sampler"):
        types(graph([bad], {"x": (F16, [2])}))


def test_constant_nodes_have_the_type_of_their_value():
    value = onnx.numpy_helper.from_array(np.array([1.0], np.float32))
    nodes = [
        onnx.helper.make_node("Constant", [], ["c"], name="c", value=value),
        node("Mul", ["x", "c"], "y"),
    ]
    assert types(graph(nodes, {"x": (F16, [2])}))["c"] == "FLOAT"
