"""The geometry that a probe reads off a model, against the model's own parameters."""

from __future__ import annotations

import pytest

from moec.checkpoint import open_checkpoint
from moec.frontend.probe import probe
from tests.helpers.captured import captured, checkpoint
from tests.helpers.families import OVERRIDES, RECURRENT
from tests.helpers.tiny import tiny_config


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


@pytest.mark.parametrize("family", OVERRIDES)
def test_every_family_is_probed_from_its_config_alone(family, tmp_path):
    config = tiny_config(family, **OVERRIDES[family])
    config.save_pretrained(tmp_path)
    geometry = probe(open_checkpoint(tmp_path, weights=False), 64)
    assert geometry.model_type == family
    assert len(geometry.moe) >= 1
    assert len(geometry.attention) >= 1
    assert bool(geometry.states) == (family in RECURRENT)
    windows = {a.window for a in geometry.attention}
    assert windows <= {0, 8}
    assert (8 in windows) == ("sliding_window" in OVERRIDES[family] or family == "gpt_oss")
