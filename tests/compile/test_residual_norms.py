"""Sums fused with their norms compute what both did; what would not save a kernel stays."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from moec.compile.residual_norms import fuse_residual_norms
from tests.helpers.captured import captured
from tests.helpers.rng import fresh_rng

WIDTH = 8


class AddRMSNorm(OpRun):
    """As plugins/kernels/add_rms_norm.cu."""

    op_domain = "moec"

    def _run(self, x, residual, scale, epsilon=None, scale_offset=None, version=None):
        assert version == 1
        total = x + residual
        wide = total.astype(np.float32)
        normed = wide / np.sqrt(np.mean(wide**2, axis=-1, keepdims=True) + np.float32(epsilon))
        return (normed * (scale.astype(np.float32) + np.float32(scale_offset))).astype(x.dtype), total


def graph(
    offset: float | None = None,
    broadcast: bool = False,
    known: bool = True,
    axis: int | None = -1,
    epsilon: float | None = 1e-3,
    before: str = "",
    shared: bool = False,
    swapped: bool = False,
) -> ir.Graph:
    """norm(a + b) * scale, and the sum itself is read by Neg."""
    f32, shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(["b", "S", WIDTH])
    a = ir.Value(name="a", type=f32, shape=shape)
    b = ir.Value(name="b", type=f32, shape=ir.Shape([WIDTH]) if broadcast else shape)
    scale = ir.Value(name="scale", type=f32, shape=ir.Shape([WIDTH]))
    inputs, nodes, initializers = [a, b, scale], [], []

    def add(op: str, *values: ir.Value, shape: ir.Shape | None = shape, **attributes) -> ir.Value:
        nodes.append(ir.node(op, list(values), attributes, name=f"{op}_{len(nodes)}"))
        out = nodes[-1].outputs[0]
        out.name, out.type, out.shape = f"v{len(nodes)}", f32, shape
        return out

    if before:
        b = add(before, b, *([a] if before in ("Add", "Mul") else []))
    total = add("Add", *((b, a) if swapped else (a, b)), shape=shape if known else None)
    if offset is not None:
        one = ir.Value(name="one", type=f32, shape=ir.Shape([]), const_value=ir.tensor(np.float32(offset)))
        initializers.append(one)
        scale = add("Add", scale, one, shape=scale.shape)
    attributes = {} if axis is None else {"axis": axis}
    attributes |= {} if epsilon is None else {"epsilon": epsilon}
    normed = add("RMSNormalization", total, scale, **attributes)
    outputs = [normed, add("Neg", total)]
    if shared:
        outputs.append(add("Neg", b))
    opsets = {"": 24, "moec": 1}
    return ir.Graph(inputs, outputs, nodes=nodes, initializers=initializers, opset_imports=opsets)


def evaluate(g: ir.Graph, feeds: dict[str, np.ndarray]) -> list[np.ndarray]:
    model = ir.to_proto(ir.Model(g, ir_version=11))
    return ReferenceEvaluator(model, new_ops=[AddRMSNorm]).run(None, feeds)


def kinds(g: ir.Graph) -> Counter[str]:
    return Counter(node.op_type for node in g)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"offset": 1.0},
        {"epsilon": None, "axis": None},
        {"axis": 2, "swapped": True},
        {"before": "Relu"},
        {"before": "Mul", "shared": True},  # made anyway, for another reader
    ],
)
def test_a_sum_and_its_norm_become_one(form):
    rng, g = fresh_rng(), graph(**form)
    feeds = {v.name: rng.standard_normal([2, 3, WIDTH][-len(v.shape) :]).astype(np.float32) for v in g.inputs}
    expected, before = evaluate(g, feeds), kinds(g)
    assert fuse_residual_norms(g) == 1
    g.sort()
    gone = Counter({"Add": 1 + ("offset" in form), "RMSNormalization": 1})
    assert kinds(g) == before - gone + Counter({"AddRMSNorm": 1})
    for new, old in zip(evaluate(g, feeds), expected, strict=True):
        np.testing.assert_allclose(new, old, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    "form", [{"broadcast": True}, {"known": False}, {"axis": 1}, {"before": "Add"}, {"before": "Mul"}]
)
def test_what_is_no_residual_sum_or_saves_no_kernel_stays(form):
    g = graph(**form)
    before = kinds(g)
    assert fuse_residual_norms(g) == 0
    assert kinds(g) == before


def test_a_sum_that_is_an_output_stays():
    g = graph()
    g.outputs.append(next(node for node in g if node.op_type == "Add").outputs[0])
    assert fuse_residual_norms(g) == 0


# Two layers have four norms of sums. A shared expert (all layers of qwen3_next, the second of deepseek_v3) or
# a bias (gpt_oss) is added within the kernel of the sum; qwen3_next stores its norms less one.
@pytest.mark.parametrize(
    ("family", "count", "offset"),
    [
        ("gpt_oss", 2, 0.0),
        ("deepseek_v3", 3, 0.0),
        pytest.param("mixtral", 4, 0.0, marks=pytest.mark.slow),
        pytest.param("qwen3_next", 2, 1.0, marks=pytest.mark.slow),
    ],
)
def test_norms_of_real_models(family, count, offset):
    graph = captured(family).model.clone().graph
    assert fuse_residual_norms(graph) == count
    fused = [node for node in graph if node.op_type == "AddRMSNorm"]
    assert {node.attributes["scale_offset"].as_float() for node in fused} == {offset}
    assert all(node.inputs[2].name.endswith("norm.weight") for node in fused)
