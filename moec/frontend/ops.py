"""The torch operators that stand for attention, experts and the last token in a traced model.

They exist in traced graphs only (shapes, no kernels): `translate.py` gives each one its standard ONNX form.
"""

from __future__ import annotations

import torch

_LIB = torch.library.Library("moec", "DEF")
_LIB.define(
    "attention(Tensor q, Tensor k, Tensor v, Tensor past_k, Tensor past_v, Tensor slot_ids, Tensor start, "
    "Tensor positions, Tensor? sinks, float scale, int window, float softcap, int layer) "
    "-> (Tensor, Tensor, Tensor)"
)
_LIB.define(
    "experts(Tensor x, Tensor ids, Tensor weights, Tensor gate_up, Tensor down, Tensor? gate_up_bias, "
    "Tensor? down_bias, str activation, bool gated, bool transposed, bool interleaved, float alpha, "
    "float limit, int layer) -> Tensor"
)
_LIB.define(
    "conv_state(Tensor x, Tensor state, Tensor slot_ids, Tensor start, Tensor num_tokens) -> (Tensor, Tensor)"
)
_LIB.define(
    "recurrence(Tensor decay, Tensor value, Tensor key, Tensor query, Tensor? beta, Tensor state, "
    "Tensor slot_ids, Tensor start) -> (Tensor, Tensor)"
)
_LIB.define("last_hidden(Tensor hidden, Tensor num_tokens) -> Tensor")


@torch.library.register_fake("moec::attention", lib=_LIB)
def _attention(q, k, v, past_k, past_v, *_):
    """q `[b,Hq,S,Dk]`, k/v `[b,Hkv,S,D]`, caches `[B,Hkv,M,D]` -> out `[b,S,Hq*Dv]` and the caches."""
    b, heads, s, _ = q.shape
    return q.new_empty(b, s, heads * v.shape[-1]), torch.empty_like(past_k), torch.empty_like(past_v)


@torch.library.register_fake("moec::experts", lib=_LIB)
def _experts(x, *_):
    """x `[T,H]`, ids and weights `[T,K]` -> `[T,H]`."""
    return x.new_empty(x.shape)


@torch.library.register_fake("moec::conv_state", lib=_LIB)
def _conv_state(x, state, *_):
    """x `[b,C,S]`, state `[B,C,K]` -> the K tokens before and x `[b,C,K+S]`, and the state updated."""
    return x.new_empty(x.shape[0], x.shape[1], state.shape[2] + x.shape[2]), torch.empty_like(state)


@torch.library.register_fake("moec::recurrence", lib=_LIB)
def _recurrence(decay, value, key, query, beta, state, *_):
    """value `[b,S,H,P]`, key and query `[b,S,H,N]`, state `[B,H,P,N]` -> out `[b,S,H,P]`, and the state."""
    return value.new_empty(value.shape), torch.empty_like(state)


@torch.library.register_fake("moec::last_hidden", lib=_LIB)
def _last_hidden(hidden, num_tokens):
    """hidden `[b,S,H]`, num_tokens `[b]` -> `[b,H]`: the row of each sequence's last valid token."""
    return hidden.new_empty(hidden.shape[0], hidden.shape[2])
