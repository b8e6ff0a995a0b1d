"""The geometry that a probe reads off a model, against the model's own parameters."""

from __future__ import annotations

import pytest

from tests.helpers.captured import captured, checkpoint


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "deepseek_v3"])
def test_moe_layers_describe_the_parameters(family):
    ckpt = checkpoint(family)
    for m in captured(family).geometry.moe:
        rows = 2 * m.intermediate_size if m.gated else m.intermediate_size
        want = (m.num_experts, m.hidden_size, rows) if m.transposed else (m.num_experts, rows, m.hidden_size)
        assert ckpt.shape(m.gate_up) == want
        assert f"layers.{m.layer}." in m.down
        assert (m.gate_up_bias is not None) == m.has_bias
        if m.has_bias:
            assert ckpt.shape(m.down_bias) == (m.num_experts, m.hidden_size)


def test_gpt_oss():
    m = captured("gpt_oss").geometry.moe[0]
    assert (m.activation, m.transposed, m.interleaved, m.has_bias) == ("swiglu_oai", True, True, True)
    assert (m.alpha, m.limit) == (1.702, 7.0)


def test_latent_attention_is_seen_expanded():
    geometry = captured("deepseek_v3").geometry
    assert [(a.num_kv_heads, a.k_dim, a.v_dim) for a in geometry.attention] == [(4, 48, 32)] * 2
    assert [m.layer for m in geometry.moe] == [1]  # the first layer is dense
