"""Writes tiny transformers models as GGUF, the way llama.cpp's converter does (names and layouts by hand)."""

from __future__ import annotations

import re
from pathlib import Path

import gguf
import numpy as np
import torch

ARCHITECTURES = {
    "mixtral": "llama", "qwen2_moe": "qwen2moe", "qwen3_moe": "qwen3moe", "gpt_oss": "gpt-oss",
    "minimax_m2": "minimax-m2",
}  # fmt: skip
_LAYER = {
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate": "ffn_gate_inp",
    "mlp.router": "ffn_gate_inp",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp",
    "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp",
    "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}
_TOP = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}


def write_gguf(path: Path, model: torch.nn.Module, qtype: gguf.GGMLQuantizationType, tokenizer=None) -> Path:
    """Matrices in `qtype`, vectors and routers in F32."""
    config = model.config
    writer = gguf.GGUFWriter(path, ARCHITECTURES[config.model_type])
    _metadata(writer, config)
    if tokenizer is not None:
        _tokenizer(writer, tokenizer)
    for name, tensor in tensors(model).items():
        plain = tensor.ndim == 1 or "ffn_gate_inp" in name
        if plain:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, qtype), raw_dtype=qtype)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def tensors(model: torch.nn.Module) -> dict[str, np.ndarray]:
    """GGUF name -> float32 array."""
    config, out = model.config, {}
    tied = config.tie_word_embeddings
    for name, value in model.state_dict().items():
        if not (tied and name == "lm_head.weight"):
            array = np.ascontiguousarray(value.float().numpy())
            out |= {n: np.ascontiguousarray(a) for n, a in _one(name, array, config).items()}
    return out


def _one(name: str, array: np.ndarray, config) -> dict[str, np.ndarray]:
    match = re.fullmatch(r"model\.layers\.(\d+)\.(.*)", name)
    if match is None:
        stem, _, suffix = name.rpartition(".")
        return {f"{_TOP[stem]}.{suffix}": array}
    block, rest = f"blk.{match[1]}.", match[2]
    if rest == "mlp.e_score_correction_bias":
        return {f"{block}exp_probs_b.bias": array}
    if rest == "self_attn.sinks":
        return {f"{block}attn_sinks.weight": array}
    if ".experts." in rest:
        return {block + n: a for n, a in _experts(rest, array, config.model_type == "gpt_oss").items()}
    stem, _, suffix = rest.rpartition(".")
    if config.model_type == "gpt_oss" and stem == "post_attention_layernorm":
        return {f"{block}post_attention_norm.{suffix}": array}
    if config.model_type == "mixtral" and stem in ("self_attn.q_proj", "self_attn.k_proj"):
        heads = config.num_attention_heads if ".q_" in stem else config.num_key_value_heads
        array = array.reshape(heads, 2, -1, array.shape[1]).swapaxes(1, 2).reshape(array.shape)
    return {f"{block}{_LAYER[stem]}.{suffix}": array[0] if stem == "mlp.shared_expert_gate" else array}


def _experts(rest: str, array: np.ndarray, gpt_oss: bool) -> dict[str, np.ndarray]:
    suffix = "bias" if rest.endswith("_bias") else "weight"
    if gpt_oss and suffix == "weight":
        array = array.swapaxes(1, 2)
    if "down_proj" in rest:
        return {f"ffn_down_exps.{suffix}": array}
    half = array.shape[1] // 2
    gate, up = (array[:, 0::2], array[:, 1::2]) if gpt_oss else (array[:, :half], array[:, half:])
    return {f"ffn_gate_exps.{suffix}": gate, f"ffn_up_exps.{suffix}": up}


def _metadata(w: gguf.GGUFWriter, c) -> None:
    w.add_context_length(c.max_position_embeddings)
    w.add_block_count(c.num_hidden_layers)
    w.add_embedding_length(c.hidden_size)
    w.add_feed_forward_length(c.intermediate_size)
    w.add_head_count(c.num_attention_heads)
    w.add_head_count_kv(c.num_key_value_heads)
    dim = getattr(c, "head_dim", None) or c.hidden_size // c.num_attention_heads
    w.add_key_length(dim)
    w.add_value_length(dim)
    w.add_rope_dimension_count(int(dim * c.rope_parameters.get("partial_rotary_factor", 1)))
    w.add_layer_norm_rms_eps(c.rms_norm_eps)
    w.add_rope_freq_base(c.rope_parameters["rope_theta"])
    w.add_vocab_size(c.vocab_size)
    w.add_expert_count(getattr(c, "num_local_experts", None) or c.num_experts)
    w.add_expert_used_count(c.num_experts_per_tok)
    if c.model_type in ("qwen2_moe", "qwen3_moe"):
        w.add_expert_feed_forward_length(c.moe_intermediate_size)
    if c.model_type == "qwen2_moe":
        w.add_expert_shared_feed_forward_length(c.shared_expert_intermediate_size)
    if c.model_type == "minimax_m2":
        w.add_expert_feed_forward_length(c.intermediate_size)
        w.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if c.model_type == "gpt_oss":
        w.add_expert_feed_forward_length(c.intermediate_size)
        w.add_sliding_window(c.sliding_window)
        w.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        w.add_rope_scaling_factor(c.rope_parameters["factor"])
        w.add_rope_scaling_orig_ctx_len(c.rope_parameters["original_max_position_embeddings"])


def _tokenizer(w: gguf.GGUFWriter, tokenizer) -> None:
    """A byte-level BPE."""
    import json

    tree = json.loads(tokenizer.backend_tokenizer.to_str())
    special = {t["content"] for t in tree["added_tokens"]}
    vocab = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    w.add_tokenizer_model("gpt2")
    w.add_tokenizer_pre("default")
    w.add_token_list([token for token, _ in vocab])
    kinds = (gguf.TokenType.NORMAL, gguf.TokenType.CONTROL)
    w.add_token_types([kinds[token in special] for token, _ in vocab])
    w.add_token_merges([" ".join(pair) for pair in tree["model"]["merges"]])
    w.add_bos_token_id(tokenizer.bos_token_id)
    w.add_eos_token_id(tokenizer.eos_token_id)
