"""Routers of captured models, and what happens where one does not fit."""

from __future__ import annotations

import pytest

from moec.rewrite.experts import lower_experts
from moec.rewrite.router import lower_router
from tests.helpers.captured import captured
from tests.rewrite.test_pipeline import context

WANT = {
    "qwen2_moe": dict(scoring="softmax", renormalize=1, num_groups=1, routed_scale=1.0),
    # softmax over the chosen logits is the same function as softmax over all, renormalised
    "gpt_oss": dict(scoring="softmax", renormalize=1, num_groups=1, routed_scale=1.0),
    "deepseek_v3": dict(
        scoring="sigmoid", renormalize=1, num_groups=2, topk_groups=1, group_score="top2", routed_scale=2.5
    ),
}


@pytest.mark.parametrize("family", WANT)
def test_families(family):
    model, made, notes = captured(family).model.clone(), context(family), []
    lower_experts(model, made, notes)
    assert lower_router(model, made, notes) == len(made.geometry.moe)
    assert not notes
    for node in (n for n in model.graph if n.op_type == "PipelinedMoE"):
        assert {k: node.attributes[k].value for k in WANT[family]} == WANT[family]
        router, bias, selection = (v.name for v in node.inputs[2:5])
        assert router.endswith("gate.weight" if family != "gpt_oss" else "router.weight")
        assert bias.endswith("router.bias") == (family == "gpt_oss")
        assert selection.endswith("e_score_correction_bias") == (family == "deepseek_v3")


@pytest.mark.slow
def test_router_that_does_not_fit_stays_and_is_named():
    model, made, notes = captured("phimoe").model.clone(), context("phimoe"), []
    lower_experts(model, made, notes)
    assert lower_router(model, made, notes) == 0
    assert notes[0].startswith("router of layer 0:")
    assert "model.layers.0.mlp.router.weight" in made.keep_float
    assert sum(n.op_type == "Experts" for n in model.graph) == 2
