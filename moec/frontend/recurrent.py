"""Linear-attention and convolution layers: their states, and the scans that read and write them.

transformers gives each kind of recurrence one function, by the name of the kernel it stands for, in every
modeling file that needs it. They are replaced by name while a model is probed or traced, whatever the family.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from transformers.cache_utils import LinearAttentionLayer

from moec.bundle.geometry import StateTensor
from moec.errors import MoecError
from moec.frontend.hooks import current


class RecurrentLayer(LinearAttentionLayer):
    """A cache layer that never shows its state to the modeling code; convolutions and scans take it here.

    Args:
        layer: Index of the decoder layer.
        states: Names of its states and their tensors `[B,...]`; empty while a model is probed.
    """

    def __init__(self, layer: int, states: dict[str, torch.Tensor] | None = None) -> None:
        super().__init__(number_of_states=8)
        self.layer, self.states = layer, states or {}
        self.updated: dict[str, torch.Tensor] = {}
        self.seen: dict[str, StateTensor] = {}

    def update_conv_state(
        self, conv_states: torch.Tensor, state_idx: int = 0, conv_kernel_size: int | None = None, **_: Any
    ) -> torch.Tensor:
        """x `[b,C,S]` -> the K tokens before and x."""
        trace, name = current(), f"conv{state_idx}"
        trace.recurrent = self
        if trace.probing:
            if conv_kernel_size is None:
                raise MoecError(f"layer {self.layer}: its convolution does not say how much it keeps")
            self.seen[name] = StateTensor(self.layer, name, (conv_states.shape[1], conv_kernel_size))
            return F.pad(conv_states, (conv_kernel_size, 0))
        full, self.updated[name] = torch.ops.moec.conv_state(
            conv_states, self.states[name], trace.slot_ids, trace.start, trace.num_tokens
        )
        return full

    def update_recurrent_state(self, recurrent_states: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
        """The scan has kept the state; anything else that arrives here is a recurrence that moec lacks."""
        if "recurrent" not in self.seen and "recurrent" not in self.updated:
            raise MoecError(f"layer {self.layer} has a recurrence that is not supported")
        return recurrent_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


def scan(
    log_decay: torch.Tensor, value: torch.Tensor, key: torch.Tensor, query: torch.Tensor,
    beta: torch.Tensor | None = None,
) -> torch.Tensor:  # fmt: skip
    """The recurrence S = decay S + w key^T, out = S query, from the current layer's state; all fp32.

    Args:
        log_decay: `[b,S,H,P|1,N|1]`.
        value: `[b,S,H,P]`; without `beta` w = value, with it (`[b,S,H]`) w = beta (value - decay S key).
        key, query: `[b,S,H,N]`.

    Returns:
        `[b,S,H,P]`.
    """
    trace, (_, s, heads, width) = current(), value.shape
    layer = trace.recurrent
    if trace.probing:
        layer.seen["recurrent"] = StateTensor(layer.layer, "recurrent", (heads, width, key.shape[3]))
        return value
    valid = torch.arange(s) < trace.num_tokens[:, None]  # [b,S]: padding decays nothing and adds nothing
    mask = valid.float()
    decay = (log_decay * mask[:, :, None, None, None]).exp()
    if beta is None:
        value = value * mask[:, :, None, None]
    else:
        beta = beta * mask[:, :, None]
    out, layer.updated["recurrent"] = torch.ops.moec.recurrence(
        decay, value, key, query, beta, layer.states["recurrent"], trace.slot_ids, trace.start
    )
    return out


def _heads(x: torch.Tensor, heads: int) -> torch.Tensor:
    """`[b,S,G,N]` -> `[b,S,heads,N]`, each group as often as it has heads."""
    b, s, groups, n = x.shape
    return x[:, :, :, None].expand(b, s, groups, heads // groups, n).reshape(b, s, heads, n)


def gated_delta_rule(
    query, key, value, g, beta, output_final_state=False, use_qk_l2norm_in_kernel=False, **_
):  # fmt: skip
    """Gated DeltaNet (arXiv:2412.06464) and Kimi Delta Attention (arXiv:2510.26692).

    q, k `[b,S,Hk,Dk]`, v `[b,S,Hv,Dv]`, beta `[b,S,Hv]`, g `[b,S,Hv]` or, a decay a channel, `[b,S,Hv,Dk]`.
    """
    dtype, heads = value.dtype, value.shape[2]
    query, key, value, g, beta = (x.float() for x in (query, key, value, g, beta))
    if use_qk_l2norm_in_kernel:
        query, key = (x * torch.rsqrt((x * x).sum(-1, keepdim=True) + 1e-6) for x in (query, key))
    query = query * query.shape[-1] ** -0.5
    query, key = _heads(query, heads), _heads(key, heads)
    out = scan(g[..., None, None] if g.dim() == 3 else g[..., None, :], value, key, query, beta)
    return out.to(dtype), _kept(out)


def mamba2(
    hidden_states, dt, A, B, C, chunk_size=0, D=None, dt_bias=None, dt_softplus=False,
    dt_limit=(0.0, float("inf")), z=None, return_final_states=False, **_,
):  # fmt: skip
    """Mamba-2 (arXiv:2405.21060); hidden_states `[b,S,H,P]`, dt `[b,S,H]`, A `[H]`, B, C `[b,S,G,N]`."""
    heads, x = hidden_states.shape[2], hidden_states.float()
    dt = _step(dt, dt_bias, dt_softplus).clamp(*_limits(dt_limit))
    log_decay = (A.float() * dt)[..., None, None]
    out = scan(log_decay, x * dt[..., None], _heads(B.float(), heads), _heads(C.float(), heads))
    if D is not None:
        out = out + x * D.float()[:, None]
    return (out, _kept(out)) if return_final_states else out


def mamba(
    hidden_states, dt, A, B, C, D=None, z=None, delta_bias=None, delta_softplus=False,
    return_last_state=False, **_,
):  # fmt: skip
    """Mamba (arXiv:2312.00752); hidden_states, dt, z `[b,D,S]`, A `[D,N]`, B, C `[b,N,S]`."""
    dtype, x = hidden_states.dtype, hidden_states.transpose(1, 2).float()
    dt = _step(dt.transpose(1, 2), delta_bias, delta_softplus)
    log_decay = (dt[..., None] * A.float())[:, :, None]
    key, query = (t.transpose(1, 2).float()[:, :, None] for t in (B, C))
    out = scan(log_decay, (x * dt)[:, :, None], key, query)[:, :, 0]
    if D is not None:
        out = out + x * D.float()
    out = out.transpose(1, 2)
    out = out if z is None else out * F.silu(z.float())
    out = out.to(dtype)
    return (out, _kept(out)) if return_last_state else out


def _kept(out: torch.Tensor) -> torch.Tensor:
    """Stands for the last state where the modeling code hands it on: `scan` has kept the real one."""
    return out.new_zeros(())


def _step(dt: torch.Tensor, bias: torch.Tensor | None, softplus: bool) -> torch.Tensor:
    dt = dt.float() if bias is None else dt.float() + bias.float()
    return F.softplus(dt) if softplus else dt


def _limits(limit: tuple[float, float]) -> tuple[float, float | None]:
    low, high = limit
    return low, None if high == float("inf") else high


_SCANS = {
    "torch_chunk_gated_delta_rule": gated_delta_rule,
    "chunk_kimi_delta_attention": gated_delta_rule,
    "mamba2_chunk_scan": mamba2,
    "mamba_selective_scan": mamba,
}


@contextlib.contextmanager
def replaced_scans(model: Any) -> Iterator[None]:
    """Replaces the scans of the model's modeling file while the context is open."""
    module = sys.modules[type(model).__module__]
    old = {name: getattr(module, name) for name in _SCANS if hasattr(module, name)}
    for name in old:
        setattr(module, name, _SCANS[name])
    try:
        yield
    finally:
        for name, function in old.items():
            setattr(module, name, function)
