"""The geometry of a model, read off one forward pass on the meta device: nothing is computed."""

from __future__ import annotations

import re
from typing import Any

import torch

from moec.bundle.geometry import AttentionLayer, Geometry, MoELayer
from moec.checkpoint import Checkpoint
from moec.checkpoint.skeleton import meta_model
from moec.errors import MoecError
from moec.frontend import families
from moec.frontend.activation import activation_of
from moec.frontend.hooks import NAME, AttentionCall, ExpertsCall, KVLayer, Trace, tracing, up_name
from moec.frontend.recurrent import RecurrentLayer, replaced_scans


def probe(ckpt: Checkpoint, context: int) -> Geometry:
    """Shapes and constants of every attention and MoE layer, as seen by a cache of `context` tokens.

    Windows of `context` tokens or more are no windows at all and are reported as 0.

    Raises:
        MoecError: A layer that moec cannot express, or a `context` beyond the model's.
    """
    config = ckpt.config
    limit = int(getattr(config, "max_position_embeddings", context))
    if context > limit:
        raise MoecError(f"context {context} is longer than the model's {limit}", where=str(ckpt.path))
    chunk = int(getattr(config, "attention_chunk_size", 0) or 0)
    if "chunked_attention" in (getattr(config, "layer_types", None) or ()) and context > chunk:
        what = f"{config.model_type}: chunked attention is supported within one chunk of {chunk} tokens only"
        raise MoecError(what, where=str(ckpt.path), hint=f"Use --context {chunk} or less.")
    trace = _run(ckpt)
    names = module_names(trace, ckpt)
    attention = tuple(_attention(c, context) for c in sorted(trace.attention, key=lambda c: c.layer))
    moe = tuple(_moe(c, names[id(c.module)]) for c in trace.experts)
    if not moe:
        raise MoecError(f"{config.model_type}: its experts cannot be captured", where=str(ckpt.path))
    states = tuple(s for x in trace.layers if isinstance(x, RecurrentLayer) for s in x.seen.values())
    return Geometry(config.model_type, config.vocab_size, config.hidden_size, limit, attention, moe, states)


def cache_layers(config: Any) -> list[Any]:
    """transformers' own cache layers of this model: they know windows and which layers are recurrent.

    Raises:
        MoecError: A layer keeps something else than keys and values or recurrent states.
    """
    from transformers import DynamicCache, cache_utils

    layers = DynamicCache(config=config).layers
    # Families that leave their layers to be made on first use have plain full attention everywhere.
    layers += [cache_utils.DynamicLayer() for _ in range(config.num_hidden_layers - len(layers))]
    known = ("DynamicLayer", "DynamicSlidingWindowLayer", "LinearAttentionLayer", "DummyLayer")
    kinds = getattr(config, "layer_types", None) or [type(layer).__name__ for layer in layers]
    for kind, layer in zip(kinds, layers, strict=False):
        if type(layer).__name__ not in known:
            raise MoecError(f"{config.model_type}: layers of type {kind} are not supported")
    return layers


def is_recurrent(layer: Any) -> bool:
    """Whether one of transformers' cache layers has a state in place of keys and values."""
    return type(layer).__name__ == "LinearAttentionLayer"


def window_of(layer: Any) -> int:
    """Window of one of transformers' cache layers; 0 = full attention."""
    return int(getattr(layer, "sliding_window", 0) or 0) if getattr(layer, "is_sliding", False) else 0


def _run(ckpt: Checkpoint) -> Trace:
    from transformers import DynamicCache

    model = meta_model(ckpt.config, attn_implementation=NAME)
    use_hooks(model)
    empty = torch.empty(0, device="meta")
    layers = [
        RecurrentLayer(i) if is_recurrent(layer) else KVLayer(empty, empty, window_of(layer))
        for i, layer in enumerate(cache_layers(ckpt.config))
    ]
    cache = DynamicCache(config=ckpt.config)
    cache.layers = layers
    ids = torch.zeros(1, 2, dtype=torch.long, device="meta")
    with torch.no_grad(), families.patched(model), replaced_scans(model), tracing(Trace(layers)) as trace:
        try:
            model(input_ids=ids, cache=cache, use_cache=True)
        except MoecError as e:
            raise MoecError(f"{ckpt.config.model_type}: {e.what}", where=e.where, hint=e.hint) from e
        except Exception as e:  # modeling code of a family that nobody has tried
            what = f"{ckpt.config.model_type} cannot be captured: {_first_line(e)}"
            raise MoecError(what, where=str(ckpt.path)) from e
    trace.names = {id(m): n for n, m in model.named_modules()}
    return trace


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def use_hooks(model: Any) -> None:
    """Routes the model's attention and experts to the hooks."""
    model.set_attn_implementation(NAME)
    if model._can_set_experts_implementation():
        model.set_experts_implementation(NAME)


def layer_of(name: str) -> int:
    """Index of the decoder layer in a module name."""
    match = re.search(r"\.(\d+)\.", name)
    if match is None:
        raise MoecError(f"no layer index in the module name {name}")
    return int(match[1])


def module_names(trace: Trace, ckpt: Checkpoint) -> dict[int, str]:
    """id(experts module) -> name, for the modules that were called."""
    names = {id(c.module): trace.names[id(c.module)] for c in trace.experts}
    layers = [layer_of(n) for n in names.values()]
    if len(set(layers)) != len(layers):
        raise MoecError("two experts modules in one layer are not supported", where=str(ckpt.path))
    return names


def _attention(call: AttentionCall, context: int) -> AttentionLayer:
    return AttentionLayer(
        layer=call.layer,
        num_heads=call.query[1],
        num_kv_heads=call.key[1],
        k_dim=call.key[3],
        v_dim=call.value[3],
        scale=call.scale,
        window=call.window if call.window < context else 0,
        softcap=call.softcap,
        has_sink_logits=call.sinks,
    )


def _moe(call: ExpertsCall, name: str) -> MoELayer:
    m, form = call.module, activation_of(call.module)
    down = m.down_proj.shape  # [E,H,I], transposed [E,I,H]
    hidden, inter = (down[2], down[1]) if m.is_transposed else (down[1], down[2])
    return MoELayer(
        layer=layer_of(name),
        num_experts=down[0],
        top_k=call.top_k,
        hidden_size=hidden,
        intermediate_size=inter,
        activation=form.name,
        gated=m.has_gate,
        has_bias=m.has_bias,
        alpha=form.alpha,
        limit=form.limit,
        gate_up=f"{name}.{up_name(m)}",
        down=f"{name}.down_proj",
        gate_up_bias=f"{name}.{up_name(m)}_bias" if m.has_bias else None,
        down_bias=f"{name}.down_proj_bias" if m.has_bias else None,
        transposed=m.is_transposed,
        interleaved=not m.is_concatenated,
    )
