"""Joined norms compute what the two norms did."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
import pytest

from moec.checkpoint import open_checkpoint
from moec.compile.joined_norms import join_norms
from moec.frontend import capture
from moec.native import cpu_library
from moec.rewrite.pipeline import CPU_PASSES, MOEC_PASSES, Pass
from tests.helpers.built import build_graph
from tests.helpers.decided import LENGTHS, draw
from tests.helpers.graphs import Stepper, session, two_slots
from tests.helpers.rng import fresh_rng
from tests.helpers.tiny import tiny_checkpoint


def test_a_model_with_joined_norms_gives_the_same_logits(tmp_path):
    ckpt = open_checkpoint(tiny_checkpoint(tmp_path / "model", "qwen3_moe"))
    captured, counts = capture(ckpt, 2, 64), []
    join = Pass("join", lambda model, *_: counts.append(join_norms(model.graph)) or counts[-1])
    results = []
    texts = draw(fresh_rng(), ckpt.load_torch(), captured.geometry, (), LENGTHS)
    for passes in (MOEC_PASSES, (*MOEC_PASSES, join)):
        folder = tmp_path / str(len(passes))
        built = build_graph(ckpt, folder, captured=captured, passes=(*passes, *CPU_PASSES))
        results.append(
            two_slots(Stepper(session(built.save("model.onnx"), cpu_library()), built.constants), *texts)
        )
    assert counts == [2]
    for plain, joined in zip(*results, strict=True):
        np.testing.assert_allclose(joined, plain, rtol=0, atol=1e-5 * np.ptp(plain))


def graph(
    key_epsilon: float = 1e-6, key_heads: int = 2, spy: bool = False, norm_key: bool = True
) -> ir.Graph:
    """Queries of 4 heads and keys, each with a norm, into an attention node."""
    f32 = ir.TensorType(ir.DataType.FLOAT)
    inputs = [
        ir.Value(name=n, type=f32, shape=ir.Shape(["b", "S", h, 8])) for n, h in (("q", 4), ("k", key_heads))
    ]
    scales = [ir.Value(name=n, type=f32, shape=ir.Shape([8])) for n in ("q_scale", "k_scale")]
    nodes = []
    for x, scale, epsilon in zip(inputs, scales, (1e-6, key_epsilon), strict=True):
        nodes.append(
            ir.node("RMSNormalization", [x, scale], attributes={"axis": -1, "epsilon": epsilon}, name=x.name)
        )
        nodes[-1].outputs[0].shape = x.shape
    q, k = nodes[0].outputs[0], nodes[1].outputs[0] if norm_key else inputs[1]
    nodes.append(ir.node("AsymKVAttention", [q, k], domain="moec"))
    if spy:
        nodes.append(ir.node("Neg", [k]))
    outputs = [n.outputs[0] for n in nodes[2:]]
    return ir.Graph(inputs, outputs, nodes=nodes, initializers=scales, opset_imports={"": 24, "moec": 1})


def test_equal_norms_are_joined():
    g = graph()
    assert join_norms(g) == 1
    assert [n.op_type for n in g].count("RMSNormalization") == 1


@pytest.mark.parametrize(
    "other", [dict(key_epsilon=1e-5), dict(key_heads="h"), dict(spy=True), dict(norm_key=False)]
)
def test_what_differs_or_is_read_elsewhere_stays(other):
    g = graph(**other)
    before = [n.op_type for n in g]
    assert join_norms(g) == 0
    assert [n.op_type for n in g] == before
