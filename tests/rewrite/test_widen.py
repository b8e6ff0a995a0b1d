"""Graphs captured in fp16 and bf16: every rule fires, and they compute what the float32 graph does."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import onnx_ir as ir
import pytest
import torch

from moec import native
from moec.errors import MoecError
from moec.frontend import Captured, capture
from moec.reference.kv_layout import KVLayout
from moec.rewrite import RewriteContext, run
from moec.rewrite.pipeline import MOEC_PASSES
from moec.rewrite.widen import half_type, widen
from tests.helpers.built import build_graph
from tests.helpers.captured import BATCH, CONTEXT, captured, checkpoint
from tests.helpers.decided import decided_texts
from tests.helpers.graphs import Stepper, session, two_slots

TYPES = {
    "fp16": (torch.float16, ir.DataType.FLOAT16, 2.0**-11),
    "bf16": (torch.bfloat16, ir.DataType.BFLOAT16, 2.0**-8),
}
# Plain; sink logits, windows, clamped SwiGLU with rounded constants; latent attention and grouped sigmoid
# routing; then those that differ in something else.
CASES = [("qwen2_moe", "fp16"), ("gpt_oss", "bf16"), ("deepseek_v3", "bf16")]
MORE = [
    ("qwen2_moe", "bf16"), ("gpt_oss", "fp16"), ("deepseek_v3", "fp16"), ("mixtral", "bf16"),
    ("olmoe", "fp16"), ("deepseek_v2", "bf16"), ("granitemoe", "bf16"), ("minimax_m2", "fp16"),
    ("ernie4_5_moe", "bf16"), ("qwen3_next", "bf16"),
]  # fmt: skip
ALL = [*CASES, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)]


@cache
def half(family: str, dtype: str) -> Captured:
    return capture(checkpoint(family), BATCH, CONTEXT, TYPES[dtype][0])


def context(captured: Captured) -> RewriteContext:
    layers = captured.geometry.attention
    layouts = {a.layer: KVLayout("fp32", a.num_kv_heads, a.k_dim, a.v_dim, CONTEXT, a.window) for a in layers}
    return RewriteContext(captured.geometry, layouts)


def types(model: ir.Model) -> set[ir.DataType | None]:
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    return {v.dtype for v in (*values, *(o for node in model.graph for o in node.outputs))}


@pytest.mark.parametrize(("family", "dtype"), ALL)
def test_every_rule_fires(family, dtype):
    exported, (_, onnx_type, tolerance) = half(family, dtype), TYPES[dtype]
    products = [node for node in exported.model.graph if node.op_type == "MatMul"]
    assert onnx_type in {node.outputs[0].dtype for node in products}
    assert half_type(exported.model.graph) == onnx_type
    model, choices = exported.model.clone(), context(exported)
    reports = run(model, choices, passes=MOEC_PASSES)
    assert reports[0].name == "widen"
    assert choices.tolerance == tolerance
    assert not types(model) & {ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
    found = Counter(node.op_type for node in model.graph)
    assert found["AsymKVAttention"] == len(exported.geometry.attention)
    assert found["PipelinedMoE"] == len(exported.geometry.moe)


@pytest.mark.parametrize(("family", "dtype"), ALL)
@pytest.mark.skipif(native.find_library("moec_cpu") is None, reason="libmoec_cpu.so is not built")
def test_a_run_is_close_to_the_float32_graph(family, dtype, tmp_path):
    """All but constants is float32 again; no router is so near a tie that their rounding turns it over."""
    texts = decided_texts(family, margin=4 * TYPES[dtype][2])
    results = []
    for name, exported in (("float32", captured(family)), (dtype, half(family, dtype))):
        built = build_graph(checkpoint(family), tmp_path / name, captured=exported)
        steps = Stepper(session(built.save("model.onnx"), native.cpu_library()), built.constants)
        results.append(two_slots(steps, *texts))
    for exact, rounded in zip(*results, strict=True):
        assert np.abs(rounded - exact).max() <= 2 * TYPES[dtype][2] * np.ptp(exact)


def test_float32_graphs_are_left_alone():
    model = captured("qwen2_moe").model.clone()
    choices = context(captured("qwen2_moe"))
    before = ir.to_proto(model).graph.node
    assert widen(model, choices, []) == 0
    assert choices.tolerance == 1e-5
    assert ir.to_proto(model).graph.node == before
    assert "widen" not in [report.name for report in run(model, choices, passes=MOEC_PASSES)]


def test_a_scale_that_is_more_than_rounded_is_found():
    exported = half("gpt_oss", "bf16")
    first, *others = exported.geometry.attention
    wrong = replace(first, scale=first.scale * 1.02)
    geometry = replace(exported.geometry, attention=(wrong, *others))
    choices = context(Captured(exported.model, geometry))
    with pytest.raises(MoecError, match=f"attention layer {first.layer} cannot be rewritten: scale is"):
        run(exported.model.clone(), choices, passes=MOEC_PASSES)
