"""Tiny random checkpoints of many MoE families, made by transformers itself."""

from __future__ import annotations

import inspect
import os
from pathlib import Path
from typing import Any

import torch

from moec.checkpoint.skeleton import quiet

os.environ.setdefault("HF_HUB_OFFLINE", "1")

# Each family's config class takes the fields it knows.
_BASE: dict[str, Any] = dict(
    vocab_size=128, hidden_size=64, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2, head_dim=32,
    intermediate_size=96, moe_intermediate_size=48, shared_expert_intermediate_size=80, num_experts=8,
    num_local_experts=8, n_routed_experts=8, moe_num_experts=8, num_routed_experts=8, num_experts_per_tok=2, moe_k=2,
    moe_topk=2, num_experts_per_token=2, max_position_embeddings=256, bos_token_id=1, eos_token_id=2, n_group=2,
    topk_group=1, num_expert_group=2, q_lora_rank=32, kv_lora_rank=32, qk_nope_head_dim=32, qk_rope_head_dim=16,
    v_head_dim=32, first_k_dense_replace=1, n_shared_experts=1, num_shared_experts=1, tie_word_embeddings=False,
)  # fmt: skip
_FAMILY: dict[str, dict[str, Any]] = {
    "qwen3_moe": dict(mlp_only_layers=[], decoder_sparse_step=1),
    "deepseek_v2": dict(topk_method="group_limited_greedy", num_key_value_heads=4),
    "deepseek_v3": dict(num_key_value_heads=4),
    "gpt_oss": dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
    "ernie4_5_moe": dict(moe_layer_start_index=1, moe_layer_end_index=-1),
    "qwen3_next": dict(
        layer_types=["linear_attention", "full_attention"], linear_num_key_heads=2, linear_num_value_heads=4,
        linear_key_head_dim=16, linear_value_head_dim=16, mlp_only_layers=[],
    ),
    "llama4_text": dict(
        intermediate_size_mlp=96, num_experts_per_tok=1, interleave_moe_layer_step=1, no_rope_layers=[1, 0],
        layer_types=["chunked_attention", "full_attention"], attention_chunk_size=64, moe_layers=[0, 1],
    ),
}  # fmt: skip


def tiny_config(family: str, **overrides: Any) -> Any:
    """A two-layer configuration of `family`; `overrides` are passed to its config class."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    cls = CONFIG_MAPPING[family]
    known = set(vars(cls())) | set(getattr(cls, "attribute_map", None) or {})
    known |= set(inspect.signature(cls.__init__).parameters)
    fields = {k: v for k, v in _BASE.items() if k in known}
    if "kv_lora_rank" in known:
        fields.pop("head_dim", None)
    return cls(**{**fields, "pad_token_id": None, **_FAMILY.get(family, {}), **overrides})


def tiny_model(family: str, seed: int, dtype: torch.dtype = torch.float32, **overrides: Any) -> Any:
    """A random model whose zero-initialised parameters and buffers (biases, sinks, corrections) are random too."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(seed)
    config = tiny_config(family, **overrides)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=dtype).eval()
    with torch.no_grad():
        for name, p in model.named_parameters():
            if p.dim() >= 2 and "embed" not in name:
                p.normal_(std=p.shape[-1] ** -0.5 * 1.5)
            elif p.abs().max() == 0:
                p.normal_(std=0.3)
        for name, b in model.named_buffers():
            if "correction_bias" in name:
                b.normal_(std=0.1)
    return model


def save_tiny(folder: str | Path, family: str, seed: int, **options: Any) -> Path:
    """Saves `tiny_model` as a checkpoint folder and returns it."""
    with quiet():
        tiny_model(family, seed, **options).save_pretrained(folder)
    return Path(folder)
