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
    "granitemoe": dict(attention_multiplier=0.1),  # 1, the default, is so steep that float32 is 2e-5 off
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

_DELTA_NET = dict(
    layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
    linear_key_head_dim=16, linear_value_head_dim=16,
)  # fmt: skip

RECURRENT: dict[str, dict[str, Any]] = {
    "qwen3_next": _DELTA_NET,
    "qwen3_5_moe_text": _DELTA_NET,
    "lara_mini": _DELTA_NET,
    "kimi_linear": dict(
        layer_types=["linear_attention", "full_attention"], num_key_value_heads=4, head_dim=48
    ),
    "bailing_hybrid": dict(
        layer_types=["linear_attention", "full_attention"], num_key_value_heads=4, head_dim=48
    ),
    "lfm2_moe": dict(layer_types=["conv", "full_attention"], num_dense_layers=1, conv_L_cache=3),
    "jamba": dict(
        attn_layer_period=2, attn_layer_offset=1, expert_layer_period=2, expert_layer_offset=1,
        mamba_d_state=16, mamba_dt_rank=8,
    ),
    "granitemoehybrid": dict(
        layer_types=["linear_attention", "full_attention"], mamba_n_heads=8, mamba_d_head=32,
        mamba_d_state=16, mamba_n_groups=2, shared_intermediate_size=80,
    ),
    "nemotron_h": dict(
        layer_types=["linear_attention", "moe", "full_attention", "mlp"], num_hidden_layers=4,
        mamba_num_heads=8, mamba_head_dim=16, n_groups=2, ssm_state_size=16,
    ),
}  # fmt: skip
"""Families with linear-attention, state-space or convolution layers beside attention."""

ONE_PASS = ("nemotron_h",)
"""transformers' single steps differ from its own pass over a whole text here (1e-3 of the range)."""

OVERRIDES = NAMED | OTHERS | RECURRENT
