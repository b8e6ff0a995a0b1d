"""The whole rewrite: nodes, reports, dumps, and results in ONNX Runtime against transformers."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx
import pytest

from moec import native
from moec.reference.kv_layout import KVLayout
from moec.rewrite import CPU_PASSES, MOEC_PASSES, PASSES, RewriteContext, run
from moec.rewrite.graph_edit import all_logits, with_functions
from tests.helpers.built import build_graph
from tests.helpers.captured import ALL_FAMILIES, BATCH, CONTEXT, FAMILIES, captured, checkpoint
from tests.helpers.decided import SUMS, Run, decided_texts
from tests.helpers.graphs import (
    Stepper,
    half_reference_logits,
    random_texts,
    reference_logits,
    session,
    two_slots,
)

needs_library = pytest.mark.skipif(
    native.find_library("moec_cpu") is None, reason="libmoec_cpu.so is not built (cmake --build build/native)"
)


def context(family: str, kv: str = "mkv2", **options) -> RewriteContext:
    """A context for the captured tiny model."""
    geometry = captured(family).geometry
    layouts = {
        a.layer: KVLayout(kv, a.num_kv_heads, a.k_dim, a.v_dim, CONTEXT, a.window) for a in geometry.attention
    }
    return RewriteContext(geometry, layouts, **options)


def _check(
    stepper: Stepper, family: str, tolerance: float, margin: float = SUMS, reference: Run = reference_logits
) -> None:
    texts = decided_texts(family, margin=margin, run=reference)
    model = checkpoint(family).load_torch()
    for got, text in zip(two_slots(stepper, *texts), texts, strict=True):
        np.testing.assert_allclose(got, reference(model, text), atol=tolerance)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_function_bodies_equal_transformers(family, tmp_path):
    built = build_graph(checkpoint(family), tmp_path, captured=captured(family), batch=BATCH, context=CONTEXT)
    with_functions(built.model)
    _check(Stepper(session(built.save("f.onnx")), built.constants), family, 2e-5)


@needs_library
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_native_operators_equal_transformers(family, tmp_path):
    built = build_graph(checkpoint(family), tmp_path, captured=captured(family), batch=BATCH, context=CONTEXT)
    _check(Stepper(session(built.save("n.onnx"), native.cpu_library()), built.constants), family, 2e-5)


@needs_library
@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_fp16_cache_is_close(family, tmp_path):
    """transformers' cache is rounded, too: what is left are other roundings of values between two fp16s."""
    built = build_graph(checkpoint(family), tmp_path, captured=captured(family), kv="fp16")
    stepper = Stepper(session(built.save("n.onnx"), native.cpu_library()), built.constants)
    _check(stepper, family, 2e-3, margin=1e-3, reference=half_reference_logits)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_every_layer_becomes_its_node(family):
    model, made = captured(family).model.clone(), context(family)
    run(model, made)
    kinds = Counter(n.op_type for n in model.graph)
    assert kinds["AsymKVAttention"] == len(made.geometry.attention)
    assert kinds["PipelinedMoE"] + kinds["Experts"] == len(made.geometry.moe)
    assert kinds["Experts"] == (len(made.geometry.moe) if family in ("phimoe", "llama4_text") else 0)
    assert not kinds.keys() & {"Attention", "TensorScatter", "TopK"} or kinds["Experts"]
    left = [n for n, v in model.graph.initializers.items() if v.const_value is None and ".experts." in n]
    assert not left


def test_reports_and_callback():
    seen, model = [], captured("qwen2_moe").model.clone()
    reports = run(model, context("qwen2_moe"), on_pass=seen.append)
    assert [r.name for r in reports] == [p.name for p in PASSES] == [r.name for r in seen]
    by_name = {r.name: r for r in reports}
    assert (by_name["attention"].applied, by_name["experts"].applied, by_name["router"].applied) == (2, 2, 2)
    assert any("shared_expert_gate" in n and "fp32" in n for n in by_name["dense"].notes)


def test_stages_in_two_steps_give_the_same_graph():
    from moec.rewrite.golden import graph_text

    once, twice = (captured("qwen2_moe").model.clone() for _ in range(2))
    run(once, context("qwen2_moe"))
    run(twice, context("qwen2_moe"), passes=MOEC_PASSES)
    assert not any(n.domain == "com.microsoft" for n in twice.graph)
    run(twice, context("qwen2_moe"), passes=CPU_PASSES)
    assert graph_text(once) == graph_text(twice)


def test_dumps_are_loadable(tmp_path):
    run(captured("qwen2_moe").model.clone(), context("qwen2_moe"), dump_dir=tmp_path)
    names = sorted(p.name for p in tmp_path.glob("*.onnx"))
    assert names[0] == "00-before.onnx"
    assert names[-1] == f"{len(PASSES):02d}-{PASSES[-1].name}.onnx"
    for path in tmp_path.glob("*.onnx"):
        assert onnx.load(path, load_external_data=False).graph.node
        assert path.stat().st_size < 200_000
        assert path.with_suffix(".txt").read_text().startswith("opset")


@pytest.mark.parametrize("weights", ["int4", "bf16"])
def test_rewritten_graph_passes_the_checker(weights, tmp_path):
    built = build_graph(checkpoint("qwen2_moe"), tmp_path, captured=captured("qwen2_moe"), weights=weights)
    onnx.checker.check_model(str(built.save("m.onnx")))
    assert not [o.name for n in built.model.graph for o in n.outputs if o.type is None and o.uses()]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("weights", ["int4", "bf16"])
def test_types_agree_after_every_pass(family, weights, caplog):
    model = captured(family).model.clone()
    run(model, context(family, weights=weights))
    assert not [
        r for r in caplog.records if r.name.startswith("onnx_ir")
    ]  # shape inference found no contradiction


@needs_library
def test_all_logits_of_every_stage(tmp_path):
    family = "qwen2_moe"
    text = random_texts(2, captured(family).geometry)[0]
    want = reference_logits(checkpoint(family).load_torch(), text, last=len(text))
    built = build_graph(checkpoint(family), tmp_path, captured=captured(family))
    all_logits(built.model)
    stepper = Stepper(session(built.save("all.onnx"), native.cpu_library()), built.constants)
    got = stepper.step([(1, text)])
    assert got.shape == (1, *want.shape)
    np.testing.assert_allclose(got[0], want, atol=2e-5)


def test_all_logits_of_the_exported_graph(tmp_path):
    from moec.frontend import Captured, save_exported

    family = "qwen2_moe"
    model = all_logits(captured(family).model.clone())
    save_exported(Captured(model, captured(family).geometry), checkpoint(family), tmp_path / "e.onnx")
    text = random_texts(2, captured(family).geometry)[0]
    want = reference_logits(checkpoint(family).load_torch(), text, last=len(text))
    got = Stepper(session(tmp_path / "e.onnx")).step([(0, text)])
    np.testing.assert_allclose(got[0], want, atol=2e-5)
