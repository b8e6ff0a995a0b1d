"""What transformers calls in place of its own attention and experts while a model is probed or traced.

Both are registered under the name "moec" in transformers' registries, so no modeling code is touched. A
name without a mask function makes transformers build no mask: causality and windows are the operator's
business.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface
from transformers.cache_utils import DynamicLayer
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS

from moec.bundle.geometry import MoELayer
from moec.errors import MoecError
from moec.frontend import ops as _ops  # noqa: F401  (defines torch.ops.moec)

NAME = "moec"
_WITHOUT_EFFECT = ("position_ids", "cache_position")  # attention itself does not read them


@dataclass
class AttentionCall:
    """One attention layer as it called the hook: the module's layer index, shapes and constants."""

    layer: int
    query: torch.Size
    key: torch.Size
    value: torch.Size
    scale: float
    window: int
    softcap: float
    sinks: bool


@dataclass
class ExpertsCall:
    """One experts module as it called the hook."""

    module: torch.nn.Module
    top_k: int


@dataclass
class Trace:
    """State of one run: the caches and rows of a capture, or the record of a probe (no `slot_ids`)."""

    layers: list[Any]
    slot_ids: torch.Tensor | None = None
    start: torch.Tensor | None = None
    num_tokens: torch.Tensor | None = None
    positions: torch.Tensor | None = None
    moe: dict[int, MoELayer] = field(default_factory=dict)  # by id of the experts module
    attention: list[AttentionCall] = field(default_factory=list)
    experts: list[ExpertsCall] = field(default_factory=list)
    recurrent: Any = None  # the recurrent layer that is running

    @property
    def probing(self) -> bool:
        return self.slot_ids is None


class _Current(threading.local):
    trace: Trace | None = None


_CURRENT = _Current()


def current() -> Trace:
    """What is being traced in this thread."""
    assert _CURRENT.trace is not None
    return _CURRENT.trace


@contextlib.contextmanager
def tracing(trace: Trace) -> Iterator[Trace]:
    """Makes `trace` what the hooks of this thread see."""
    _CURRENT.trace = trace
    try:
        yield trace
    finally:
        _CURRENT.trace = None


class KVLayer(DynamicLayer):
    """A cache layer whose update gives the new keys and values back; the hook has the cached ones."""

    is_compileable = True

    def __init__(self, keys: torch.Tensor, values: torch.Tensor, window: int = 0) -> None:
        super().__init__()
        self.keys, self.values, self.window = keys, values, window
        self.device, self.dtype = keys.device, keys.dtype
        self.is_initialized = True
        self.updated: tuple[torch.Tensor, torch.Tensor] | None = None

    def update(self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any):
        return key_states, value_states

    def get_seq_length(self) -> int:
        return 0

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return query_length, 0


def attention(
    module: torch.nn.Module, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor,
    attention_mask: Any = None, scaling: float | None = None, sliding_window: int | None = None,
    s_aux: torch.Tensor | None = None, softcap: float | None = None, **others: Any,
) -> tuple[torch.Tensor, None]:  # fmt: skip
    """transformers' interface: q `[b,Hq,S,Dk]`, k `[b,Hkv,S,Dk]`, v `[b,Hkv,S,Dv]` -> `[b,S,Hq,Dv]`."""
    trace = _CURRENT.trace
    assert trace is not None
    layer = trace.layers[module.layer_idx]
    scale = float(query.shape[-1] ** -0.5 if scaling is None else scaling)
    # Not every family passes its window here (Qwen2-MoE, PhiMoE only mask): the cache layer knows it.
    window = int(sliding_window or layer.window or 0)
    cap = float(softcap or 0.0)
    b, heads, s, _ = query.shape
    if trace.probing:
        _refuse_others(module.layer_idx, {"attention_mask": attention_mask, **others})
        trace.attention.append(
            AttentionCall(
                module.layer_idx, query.shape, key.shape, value.shape, scale, window, cap, s_aux is not None
            )
        )
        return query.new_zeros(b, s, heads, value.shape[-1]), None
    window = window if window < layer.keys.shape[2] else 0  # a cache this short has no window
    out, *layer.updated = torch.ops.moec.attention(
        query, key, value, layer.keys, layer.values, trace.slot_ids, trace.start, trace.positions,
        s_aux, scale, window, cap, module.layer_idx,
    )  # fmt: skip
    return out.view(b, s, heads, value.shape[-1]), None


def _refuse_others(layer: int, arguments: dict[str, Any]) -> None:
    """A tensor that the operator does not take would change the result: a mask, a position bias."""
    for name, value in arguments.items():
        if isinstance(value, torch.Tensor) and name not in _WITHOUT_EFFECT:
            raise MoecError(f"the attention of layer {layer} takes {name}, which is not supported")


def experts(
    module: torch.nn.Module, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    """transformers' experts interface: hidden `[T,H]`, ids and weights `[T,K]` -> `[T,H]`."""
    trace = _CURRENT.trace
    assert trace is not None
    if trace.probing:
        trace.experts.append(ExpertsCall(module, ids.shape[1]))
        return torch.zeros_like(hidden)
    form = trace.moe[id(module)]
    bias = module.has_bias
    return torch.ops.moec.experts(
        hidden, ids, weights, getattr(module, up_name(module)), module.down_proj,
        getattr(module, up_name(module) + "_bias") if bias else None, module.down_proj_bias if bias else None,
        form.activation, form.gated, form.transposed, form.interleaved, form.alpha, form.limit, form.layer,
    )  # fmt: skip


def up_name(module: torch.nn.Module) -> str:
    """Attribute with the first projection of an experts module."""
    return "gate_up_proj" if module.has_gate else "up_proj"


AttentionInterface.register(NAME, attention)
ALL_EXPERTS_FUNCTIONS.register(NAME, experts)
