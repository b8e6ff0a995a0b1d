"""moec::RotaryPair against ONNX's own RotaryEmbedding, as onnx's reference evaluator computes it."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper
from onnx.reference import ReferenceEvaluator

from moec import native
from tests.helpers.cpu_op import cpu_session
from tests.helpers.rng import fresh_rng

pytestmark = pytest.mark.skipif(native.find_library("moec_cpu") is None, reason="libmoec_cpu is not built")


def _model(nodes, inputs, outputs):
    values = [helper.make_tensor_value_info(n, TensorProto.FLOAT, None) for n in (*inputs, *outputs)]
    graph = helper.make_graph(nodes, "g", values[: len(inputs)], values[len(inputs) :])
    imports = [helper.make_opsetid("", 23), helper.make_opsetid("moec", 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=11)


@pytest.mark.parametrize("shape", [(1, 1), (2, 3), (1, 40)])
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(9, 3, 64), (4, 1, 20), (1, 1, 2)])
def test_against_the_standard_operator(shape, heads, kv_heads, dim):
    rng, names = fresh_rng(), ["q", "k", "cos", "sin"]
    angles = rng.uniform(-9, 9, (*shape, dim // 2)).astype(np.float32)
    x = [rng.normal(size=(*shape, n * dim)).astype(np.float32) for n in (heads, kv_heads)]
    feeds = dict(zip(names, [*x, np.cos(angles), np.sin(angles)], strict=True))
    node = helper.make_node("RotaryPair", names, ["a", "b"], domain="moec")
    got = cpu_session(_model([node], names, ["a", "b"]), 2).run(None, feeds)
    standard = [
        helper.make_node("RotaryEmbedding", [name, "cos", "sin"], [out], num_heads=count)
        for name, out, count in (("q", "a", heads), ("k", "b", kv_heads))
    ]
    want = ReferenceEvaluator(_model(standard, names, ["a", "b"])).run(None, feeds)
    for y, reference in zip(got, want, strict=True):
        np.testing.assert_allclose(y, reference, atol=1e-6)


def test_half_heads_are_refused():
    node = helper.make_node("RotaryPair", ["q", "k", "cos", "sin"], ["a", "b"], domain="moec")
    session = cpu_session(_model([node], ["q", "k", "cos", "sin"], ["a", "b"]), 1)
    shapes = {"q": (1, 1, 12), "k": (1, 1, 8), "cos": (1, 1, 4), "sin": (1, 1, 4)}
    with pytest.raises(Exception, match="whole heads"):
        session.run(None, {name: np.zeros(shape, np.float32) for name, shape in shapes.items()})
