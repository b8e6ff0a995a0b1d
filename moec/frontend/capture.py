"""transformers model -> standard ONNX graph with symbolic b and S, without any weight in memory."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir
import torch

from moec.bundle.geometry import Geometry
from moec.checkpoint import Checkpoint
from moec.errors import MoecError
from moec.frontend import families
from moec.frontend.hooks import NAME, KVLayer, Trace, tracing
from moec.frontend.probe import cache_layers, probe, use_hooks, window_of
from moec.frontend.recurrent import RecurrentLayer, replaced_scans
from moec.frontend.simplify import simplify
from moec.frontend.translate import TABLE

OPSET = 24
_ROWS = ("input_ids", "slot_ids", "lengths", "num_tokens")
_PREFIX = "causal_lm."


@dataclass
class Captured:
    """The exported graph and the geometry. Parameters in the graph have names and shapes, no data."""

    model: ir.Model
    geometry: Geometry


class _Step(torch.nn.Module):
    """What is traced: tokens of some rows go in, logits of their last tokens and all caches come out."""

    def __init__(self, causal_lm: Any, windows: list[int], geometry: Geometry) -> None:
        super().__init__()
        self.causal_lm, self.windows, self.recurrent = causal_lm, windows, geometry.states
        self.attending = [a.layer for a in geometry.attention]
        names = {n: m for n, m in causal_lm.named_modules()}
        self.moe = {id(names[m.down.rpartition(".")[0]]): m for m in geometry.moe}

    def forward(self, input_ids, slot_ids, lengths, num_tokens, states):
        """int32 `[b,S]`, `[b]`, `[B]`, `[b]`; key and value `[B,Hkv,M,D]`, then recurrent states."""
        start = torch.index_select(lengths, 0, slot_ids)
        steps = torch.arange(input_ids.shape[1], dtype=torch.int64)
        positions = start.to(torch.int64)[:, None] + steps
        layers = self._layers(states)
        trace = Trace(layers, slot_ids, start, num_tokens, positions, self.moe)
        with tracing(trace), replaced_scans(self.causal_lm), self._last_token(num_tokens):
            out = self.causal_lm(
                input_ids=input_ids,
                position_ids=positions,
                cache=_cache(self.causal_lm.config, layers),
                use_cache=True,
            )
        cached = [t for i in self.attending for t in layers[i].updated]
        return out.logits, cached + [layers[s.layer].updated[s.name] for s in self.recurrent]

    def _layers(self, states: list[torch.Tensor]) -> list[Any]:
        kv = 2 * len(self.attending)
        pairs = dict(zip(self.attending, zip(states[:kv:2], states[1:kv:2], strict=True), strict=True))
        recurrent: dict[int, dict[str, torch.Tensor]] = {}
        for state, tensor in zip(self.recurrent, states[kv:], strict=True):
            recurrent.setdefault(state.layer, {})[state.name] = tensor
        any_pair = next(iter(pairs.values()))
        return [
            RecurrentLayer(i, recurrent[i]) if i in recurrent else KVLayer(*pairs.get(i, any_pair), window)
            for i, window in enumerate(self.windows)
        ]

    @contextlib.contextmanager
    def _last_token(self, num_tokens: torch.Tensor) -> Iterator[None]:
        head = self.causal_lm.get_output_embeddings()
        pick = lambda _, args: (torch.ops.moec.last_hidden(args[0], num_tokens),)  # noqa: E731
        handle = head.register_forward_pre_hook(pick)
        try:
            yield
        finally:
            handle.remove()


def _cache(config: Any, layers: list[Any]) -> Any:
    from transformers import DynamicCache

    cache = DynamicCache(config=config)
    cache.layers = layers
    return cache


def capture(ckpt: Checkpoint, batch: int, context: int, dtype: torch.dtype = torch.float32) -> Captured:
    """Exports the checkpoint's architecture. Parameters cost no memory: a 47 B model needs about 0.5 GB.

    Args:
        ckpt: An open checkpoint.
        batch: Slots of the cache (B).
        context: Tokens of the cache (M).
        dtype: In which the model computes: float32, float16 or bfloat16. A bundle needs float32; the rewriter
            takes all three.

    Raises:
        MoecError: The model has a part that moec cannot express; the message names it.
    """
    geometry = probe(ckpt, context)
    skeleton = ckpt.skeleton(dtype, attn_implementation=NAME)
    use_hooks(skeleton)
    windows = [w if (w := window_of(c)) < context else 0 for c in cache_layers(ckpt.config)]
    step = _Step(skeleton, windows, geometry).eval()
    args = _arguments(geometry, batch, context, dtype)
    with torch.no_grad(), families.patched(skeleton), _quiet(), _named_errors(ckpt):
        # Deferred: guards such as `S*min(128, 128*S) == 128*S` hold, but torch cannot prove them.
        program = torch.export.export(
            step, args, dynamic_shapes=_dynamic(args), strict=False,
            prefer_deferred_runtime_asserts_over_guards=True,
        )  # fmt: skip
        onnx_program = torch.onnx.export(
            program, args=(), dynamo=True, opset_version=OPSET, custom_translation_table=TABLE,
            verbose=False, optimize=False,
        )  # fmt: skip
        model = onnx_program.model
        _rename(model, ckpt, geometry)
        simplify(model)
    return Captured(model, geometry)


def _arguments(geometry: Geometry, batch: int, context: int, dtype: torch.dtype) -> tuple[Any, ...]:
    """Example inputs: 2 rows of 3 tokens (1 would be specialised), zero-storage caches."""
    i32 = torch.int32
    zero, state = torch.zeros((), dtype=dtype), torch.zeros(())  # recurrent states are float32 always
    states = []
    for a in geometry.attention:
        states += [zero.expand(batch, a.num_kv_heads, context, d) for d in (a.k_dim, a.v_dim)]
    states += [state.expand(batch, *s.shape) for s in geometry.states]
    rows = torch.zeros(2, 3, dtype=i32), torch.zeros(2, dtype=i32), torch.zeros(batch, dtype=i32)
    return (*rows, torch.ones(2, dtype=i32), states)


def _dynamic(args: tuple[Any, ...]) -> tuple[Any, ...]:
    b, s = torch.export.Dim("b", min=1, max=4096), torch.export.Dim("S", min=1, max=1 << 20)
    return ({0: b, 1: s}, {0: b}, {}, {0: b}, [{} for _ in args[-1]])


@contextlib.contextmanager
def _named_errors(ckpt: Checkpoint) -> Iterator[None]:
    """The exporter's errors are pages long: the first line, and the family."""
    try:
        yield
    except MoecError:
        raise
    except Exception as e:
        first = (str(e).splitlines() or [type(e).__name__])[0]
        raise MoecError(f"{ckpt.config.model_type} cannot be exported: {first}", where=str(ckpt.path)) from e


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """The exporter reports its progress on stdout and warns about everything; errors still pass."""
    level = logging.root.manager.disable
    logging.disable(logging.WARNING)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stdout(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(level)


def _rename(model: ir.Model, ckpt: Checkpoint, geometry: Geometry) -> None:
    """Inputs and outputs get the contract's names, initializers the names of transformers."""
    graph = model.graph
    state = [f"kv.{a.layer}.{part}" for a in geometry.attention for part in ("key", "value")]
    state += [s.input for s in geometry.states]
    for value, name in zip(graph.inputs, [*_ROWS, *state], strict=True):
        value.name = name
    for value, name in zip(graph.outputs, ["logits", *(f"{n}.out" for n in state)], strict=True):
        value.name = name
    known = set(ckpt.param_names())
    for value in list(graph.initializers.values()):
        name = value.name.removeprefix(_PREFIX)
        if name in known:
            value.name = ckpt.canonical(name)
            value.const_value = None  # a parameter of the checkpoint: only its name and shape count here
