"""Sentences about caches that differ from plain keys and values."""

from __future__ import annotations

from types import SimpleNamespace

from moec.builder.caveats import caveats
from moec.bundle.geometry import AttentionLayer, Geometry, StateTensor

PLAIN = AttentionLayer(0, 128, 128, 192, 128, 1.0)


def geometry(*states: StateTensor) -> Geometry:
    return Geometry("x", 10, 64, 128, (PLAIN,), (), states)


def test_plain_models_have_none():
    assert caveats(SimpleNamespace(), geometry()) == []


def test_latent_attention_names_both_sizes():
    """DeepSeek-V3: 128 heads of 192 + 128 against 512 + 64."""
    (said,) = caveats(SimpleNamespace(kv_lora_rank=512, qk_rope_head_dim=64), geometry())
    assert "40960 numbers" in said
    assert "latent cache has 576" in said
    assert "saves nothing" in said


def test_recurrent_layers_are_counted_once_and_sized():
    states = StateTensor(1, "conv0", (1000, 4)), StateTensor(1, "recurrent", (8, 128, 128))
    (said,) = caveats(SimpleNamespace(), geometry(*states, StateTensor(2, "conv0", (1000, 4))))
    assert said.startswith("2 recurrent layers")
    assert "0.6 MB" in said
