"""Llama 4 text: complex rotary embeddings, and an MoE block that runs every expert on every token."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from moec.errors import MoecError
from moec.frontend import hooks
from moec.frontend.families import real_rope


@contextlib.contextmanager
def patched(model: Any) -> Iterator[None]:
    """Real rotary embeddings (q and k are `[b,S,H,D]`), routed experts through the hook."""
    blocks = [m for m in model.modules() if type(m).__name__ == "Llama4TextMoe"]
    for block in blocks:
        _describe(block.experts)
        block.forward = _forward.__get__(block)
    with real_rope.patched(model, heads_axis=2):
        try:
            yield
        finally:
            for block in blocks:
                del block.forward


def _describe(experts: Any) -> None:
    """Sets the flags that transformers' own experts modules carry."""
    experts.has_gate, experts.has_bias, experts.is_transposed, experts.is_concatenated = (
        True,
        False,
        True,
        True,
    )
    experts._apply_gate = lambda x: experts.act_fn(x.chunk(2, -1)[0]) * x.chunk(2, -1)[1]


def _forward(self: Any, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The router's sigmoid scales the input of the one chosen expert; its output is added with weight one."""
    if self.top_k != 1:
        raise MoecError("Llama 4 with more than one expert a token is not supported")
    x = hidden.reshape(-1, self.hidden_dim)
    logits = torch.nn.functional.linear(x, self.router.weight)
    value, ids = torch.topk(logits, self.top_k, dim=1)
    scale = torch.sigmoid(value.float()).to(x.dtype)
    routed = hooks.experts(self.experts, x * scale, ids, torch.ones_like(scale))
    return self.shared_expert(x) + routed, logits
