"""A graph's empty initializers become plans, and find their bytes through ONNX Runtime."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import onnx_ir as ir
import onnxruntime as ort
import pytest

from moec.errors import MoecError
from moec.pack.graph_weights import bind_weights, plans_for
from moec.pack.weights import TensorPlan, write_weights
from moec.reference.weights import quantize_int4
from tests.helpers.fake_checkpoint import ArrayCheckpoint
from tests.helpers.rng import fresh_rng


def value(name: str, dtype: ir.DataType, *shape: int) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


@pytest.fixture
def checkpoint() -> ArrayCheckpoint:
    rng = fresh_rng()
    return ArrayCheckpoint(
        {
            "a": rng.normal(size=(5, 70)).astype(ml_dtypes.bfloat16),
            "e": rng.normal(size=(6, 64)).astype(ml_dtypes.bfloat16),
            "n": rng.normal(size=7).astype(ml_dtypes.bfloat16),
            "r": rng.normal(size=(4, 9)).astype(np.float32),
        }
    )


def graph_of(*initializers: ir.Value) -> ir.Model:
    """A model that hands its initializers out."""
    nodes = [ir.node("Identity", [v]) for v in initializers]
    for node, v in zip(nodes, initializers, strict=True):
        node.outputs[0].name = f"{v.name}.copy"
        node.outputs[0].type, node.outputs[0].shape = v.type, v.shape
    graph = ir.Graph(
        [],
        [n.outputs[0] for n in nodes],
        nodes=nodes,
        initializers=initializers,
        opset_imports={"": 21},
        name="g",
    )
    return ir.Model(graph, ir_version=10)


def test_plans_follow_names_types_and_sizes(checkpoint):
    ready = ir.Value(name="c", const_value=ir.tensor([1.0], name="c"))
    model = graph_of(
        value("a.codes", ir.DataType.UINT8, 5, 2, 32),
        value("a.scales", ir.DataType.FLOAT16, 5, 2),
        value("e.codes", ir.DataType.UINT8, 6, 64),
        value("e.scales", ir.DataType.FLOAT16, 6, 1),
        value("n", ir.DataType.BFLOAT16, 7),
        value("r", ir.DataType.FLOAT, 4, 9),
    )
    model.graph.initializers["c"] = ready
    want = [TensorPlan("a", "int4"), TensorPlan("e", "int8"), TensorPlan("n", "bf16"), TensorPlan("r", "f32")]
    assert plans_for(model, checkpoint.shape) == want


def test_onnx_runtime_reads_the_bound_weights(tmp_path, checkpoint):
    model = graph_of(
        value("a.codes", ir.DataType.UINT8, 5, 2, 32),
        value("a.scales", ir.DataType.FLOAT16, 5, 2),
        value("r", ir.DataType.FLOAT, 4, 9),
    )
    plans = plans_for(model, checkpoint.shape)
    bind_weights(model, write_weights(tmp_path / "weights.safetensors", plans, checkpoint))
    (tmp_path / "model.onnx").write_bytes(ir.to_proto(model).SerializeToString())
    session = ort.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    codes, scales, router = session.run(None, {})
    want = quantize_int4(checkpoint.arrays["a"])
    np.testing.assert_array_equal(codes.reshape(5, 64), want[0])
    np.testing.assert_array_equal(scales, want[1])
    np.testing.assert_array_equal(router, checkpoint.arrays["r"])


def test_what_no_parameter_can_fill(checkpoint):
    with pytest.raises(MoecError, match="no quantization"):
        plans_for(graph_of(value("a.codes", ir.DataType.UINT8, 5, 99)), checkpoint.shape)
    with pytest.raises(MoecError, match="cannot be stored as"):
        plans_for(graph_of(value("n", ir.DataType.INT64, 7)), checkpoint.shape)


def test_a_place_of_another_size(checkpoint):
    for places in ({"r": (64, 8)}, {}):
        with pytest.raises(MoecError, match="the graph wants 144"):
            bind_weights(graph_of(value("r", ir.DataType.FLOAT, 4, 9)), places)
