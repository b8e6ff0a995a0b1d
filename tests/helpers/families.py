"""Tiny configurations of every MoE family that moec supports: what differs from `tests.helpers.tiny`.

Windows are 8 tokens, so that 16 tokens of prefill and 16 of decode leave them far behind.
"""

from __future__ import annotations

from typing import Any

_SLIDING = dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"])

NAMED: dict[str, dict[str, Any]] = {
    "qwen2_moe": {},
    "gpt_oss": {},
    "deepseek_v3": {},
    "mixtral": dict(sliding_window=8),
    "qwen3_moe": {},
    "olmoe": {},
    "deepseek_v2": {},
    "granitemoe": {},
    "glm4_moe": {},
    "phimoe": {},
    "minimax_m2": {},
    "ernie4_5_moe": {},
    "llama4_text": dict(num_experts_per_tok=1),
}
"""Families of attention layers that issue C names."""

OTHERS: dict[str, dict[str, Any]] = {
    "afmoe": dict(**_SLIDING, num_dense_layers=1),
    "aria_text": {},
    "axk1": dict(num_key_value_heads=4, head_dim=16),
    "cohere2_moe": _SLIDING,
    "dots1": _SLIDING,
    "exaone_moe": _SLIDING,
    "flex_olmo": {},
    "flint": _SLIDING,
    "gemma4_text": dict(
        **_SLIDING, enable_moe_block=True, top_k_experts=2, global_head_dim=64,
        hidden_size_per_layer_input=0, vocab_size_per_layer_input=512,
    ),
    "glm4_moe_lite": dict(num_key_value_heads=4, head_dim=48),
    "granitemoe_swa": _SLIDING,
    "granitemoeshared": dict(shared_intermediate_size=80),
    "hunyuan_v1_moe": {},
    "hy_v3": {},
    "kolibri1": _SLIDING,
    "laguna": _SLIDING,
    "mellum": _SLIDING,
    "mimo_v2_flash": dict(**_SLIDING, v_head_dim=32),
    "minimax_m3_vl_text": {},
    "solar_open": {},
}  # fmt: skip
"""Families of attention layers that nobody named."""

OVERRIDES = NAMED | OTHERS
