"""The dense model as a transformers LlamaForCausalLM in float32, for writing text and training routers."""

from __future__ import annotations

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from samples.smolmoe.source import Dense


def load_model(dense: Dense) -> LlamaForCausalLM:
    """A LlamaForCausalLM that holds the GGUF's weights (fp32, eager attention off: sdpa)."""
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**dense.config()))
    weights = {name: torch.from_numpy(value.copy()) for name, value in dense.weights.items()}
    weights["lm_head.weight"] = weights["model.embed_tokens.weight"]
    model.load_state_dict(weights, assign=True, strict=True)
    model.tie_weights()
    model.model.rotary_emb = type(model.model.rotary_emb)(model.config)  # its buffers are on "meta"
    return model.eval()
