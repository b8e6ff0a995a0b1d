"""Rotary embeddings in real arithmetic for families that multiply complex numbers, which ONNX has not."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def patched(model: Any, heads_axis: int) -> Iterator[None]:
    """Replaces the complex rotation by the same one on pairs (x[2i], x[2i+1]).

    Args:
        model: A causal language model whose `model.rotary_emb` returns complex frequencies.
        heads_axis: Where the heads are in q and k: 1 for `[b,H,S,D]`, 2 for `[b,S,H,D]`.
    """
    module, rotary = sys.modules[type(model).__module__], type(model.model.rotary_emb)
    old = module.apply_rotary_emb, rotary.forward
    rotary.forward = _frequencies
    module.apply_rotary_emb = lambda q, k, f: (_rotate(q, f, heads_axis), _rotate(k, f, heads_axis))
    try:
        yield
    finally:
        module.apply_rotary_emb, rotary.forward = old


def _frequencies(self: Any, x: torch.Tensor, position_ids: torch.Tensor, **_: Any) -> torch.Tensor:
    """`[b,S]` positions -> `[b,S,D/2,2]`: cosine and sine, scaled."""
    angle = position_ids[..., None].float() * self.inv_freq.float()
    return torch.stack([angle.cos(), angle.sin()], -1) * self.attention_scaling


def _rotate(x: torch.Tensor, frequencies: torch.Tensor, heads_axis: int) -> torch.Tensor:
    cos, sin = frequencies.unsqueeze(heads_axis).unbind(-1)
    real, imag = x.float().unflatten(-1, (-1, 2)).unbind(-1)
    return torch.stack([real * cos - imag * sin, real * sin + imag * cos], -1).flatten(3).type_as(x)
