"""The experts rule: attributes follow the geometry, contradictions are refused by layer."""

from __future__ import annotations

from dataclasses import replace

import pytest

from moec.errors import MoecError
from moec.rewrite.experts import lower_experts
from tests.helpers.captured import captured
from tests.rewrite.test_pipeline import context


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_attributes(family):
    model, made = captured(family).model.clone(), context(family, experts="bf16", compute="fp32")
    assert lower_experts(model, made, []) == len(made.geometry.moe)
    nodes = [n for n in model.graph if n.op_type == "Experts"]
    for node, m in zip(nodes, made.geometry.moe, strict=True):
        values = {k: a.value for k, a in node.attributes.items()}
        assert (values["layer"], values["num_experts"], values["top_k"]) == (m.layer, m.num_experts, m.top_k)
        assert (values["activation"], values["gated"], values["has_bias"]) == (
            m.activation,
            1,
            int(m.has_bias),
        )
        assert (values["weight_format"], values["compute"], values["num_slots"]) == ("bf16", "fp32", 0)
        assert node.inputs[4].name == f"moe.{m.layer}.experts"
        assert node.inputs[4].shape[0] == m.num_experts


@pytest.mark.parametrize(
    ("family", "change", "word"),
    [
        ("qwen2_moe", dict(down="elsewhere"), "elsewhere"),
        ("qwen2_moe", dict(activation="gelu"), "form is not known"),
        ("gpt_oss", dict(limit=6.0), "limit"),
        ("gpt_oss", dict(interleaved=False), "form is not known"),
    ],
)
def test_contradictions(family, change, word):
    made = context(family)
    layers = [m if m.layer else replace(m, **change) for m in made.geometry.moe]
    made.geometry = replace(made.geometry, moe=tuple(layers))
    with pytest.raises(MoecError, match="layer 0") as info:
        lower_experts(captured(family).model.clone(), made, [])
    assert word in str(info.value)
