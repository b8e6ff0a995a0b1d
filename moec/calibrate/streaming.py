"""Run a transformers model whose weights are read from the checkpoint piece by piece, while it runs.

A decoder layer's weights are in memory only while the layer runs, and of its experts one at a time. All
windows of text go through a layer together, so every weight is read once a run: a 47 B model needs a few GB.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from moec.checkpoint import Checkpoint
from moec.checkpoint.arrays import to_torch

_NAME = "moec_streamed"
Attention = Callable[..., torch.Tensor]
OnProgress = Callable[[int, int], None]


def eager(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> torch.Tensor:
    """The model's own attention: `[b,Hq,S,Dk]`, `[b,Hkv,S,Dk]`, `[b,Hkv,S,Dv]` -> `[b,S,Hq,Dv]`."""
    forward = sys.modules[type(module).__module__].eager_attention_forward
    return forward(module, query, key, value, mask, **options)[0]


class StreamedModel:
    """A causal language model in float32 that holds no weights of its own.

    Args:
        checkpoint: Where weights are read from.
        on_progress: Called with (decoder layers done, decoder layers in all) during a run.

    Attributes:
        attention: Called as `eager` for one window at a time (b = 1); may be replaced between runs.
        on_input: None, or called as `InputPower.add` with the input of every dense and expert product.
        on_experts: None, or called with (module name, expert ids `[T,K]`) of every routed layer.
    """

    def __init__(self, checkpoint: Checkpoint, on_progress: OnProgress | None = None) -> None:
        self.checkpoint, self.on_progress = checkpoint, on_progress
        self.attention: Attention = eager
        self.on_input: Callable[..., None] | None = None
        self.on_experts: Callable[[str, torch.Tensor], None] | None = None
        self._model = checkpoint.skeleton(attn_implementation=_NAME)
        self._routed: dict[int, str] = {}
        if self._model._can_set_experts_implementation():
            self._model.set_experts_implementation(_NAME)
            self._routed = {id(m): n for n, m in self._model.named_modules() if _computed_here(m)}
        self._stored = set(checkpoint.param_names())
        self._layers, self._done = 0, 0
        for name, module, whole in _pieces(self._model):
            self._stream(name, module, whole)
        for name, module in self._model.named_modules():
            if isinstance(module, torch.nn.Linear):
                module.register_forward_pre_hook(self._dense_input(f"{name}.weight"))

    @torch.inference_mode()
    def hidden(self, ids: torch.Tensor) -> None:
        """Runs the decoder on windows int64 `[n,S]` for what the hooks see."""
        with self._running():
            getattr(self._model, self._model.base_model_prefix)(input_ids=ids, use_cache=False)

    @torch.inference_mode()
    def logits(self, ids: torch.Tensor, last: int) -> torch.Tensor:
        """Logits float32 `[n,last,V]` of the last positions of windows int64 `[n,S]`."""
        with self._running():
            return self._model(input_ids=ids, use_cache=False, logits_to_keep=last).logits.float()

    @contextlib.contextmanager
    def _running(self) -> Iterator[None]:
        self._done = 0
        token = _RUNNING.set(self)
        try:
            yield
        finally:
            _RUNNING.reset(token)

    def _attend(self, module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        """transformers' interface; one window at a time: the scores of all together would not fit."""
        outputs = []
        for i in range(len(query)):
            own = mask[i : i + 1] if mask is not None and len(mask) > 1 else mask
            parts = (x[i : i + 1] for x in (query, key, value))
            outputs.append(self.attention(module, *parts, own, **options))
        return torch.cat(outputs), None

    def _dense_input(self, name: str) -> Callable[..., None]:
        def hook(_: Any, inputs: tuple[torch.Tensor, ...]) -> None:
            if self.on_input is not None:
                self.on_input(name, inputs[0])

        return hook

    def _experts(self, module: Any, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> Any:
        if self.on_experts is not None:
            self.on_experts(self._routed[id(module)], ids)
        if not _computed_here(module):
            return type(module).forward.__wrapped__(module, hidden, ids, weights)
        out = torch.zeros_like(hidden)
        for expert in ids.unique().tolist():
            token, choice = torch.where(ids == expert)
            y = self._expert(module, expert, hidden[token])
            out.index_add_(0, token, y * weights[token, choice, None])
        return out

    def _expert(self, module: Any, expert: int, x: torch.Tensor) -> torch.Tensor:
        up = "gate_up_proj" if module.has_gate else "up_proj"
        x = self._linear(module, up, expert, x)
        x = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        return self._linear(module, "down_proj", expert, x)

    def _linear(self, module: Any, part: str, expert: int, x: torch.Tensor) -> torch.Tensor:
        name = f"{self._routed[id(module)]}.{part}"
        if self.on_input is not None:
            self.on_input(name, x, expert, self.checkpoint.shape(name)[0])
        weight = to_torch(self.checkpoint.expert(name, expert)).float()
        y = x @ (weight if module.is_transposed else weight.T)
        return y + to_torch(self.checkpoint.expert(f"{name}_bias", expert)).float() if module.has_bias else y

    def _stream(self, name: str, module: Any, whole: bool) -> None:
        """Loads the module's weights before each of its calls and drops them after it."""
        owners = module.named_modules(prefix=name) if whole else [(name, module)]
        owners = [(n, m) for n, m in owners if id(m) not in self._routed]
        self._layers += whole

        def load(*_: Any) -> None:
            for prefix, owner in owners:
                self._load(prefix, owner)

        def drop(*_: Any) -> None:
            for _, owner in owners:
                for key, parameter in owner._parameters.items():
                    if parameter is not None:
                        owner._parameters[key] = _empty(parameter)
            if whole:
                self._done += 1
                if self.on_progress is not None:
                    self.on_progress(self._done, self._layers)

        module.register_forward_pre_hook(load)
        module.register_forward_hook(drop)

    def _load(self, prefix: str, owner: Any) -> None:
        for table in (owner._parameters, owner._buffers):
            for key, tensor in table.items():
                name = f"{prefix}.{key}" if prefix else key
                if tensor is None or name not in self._stored:
                    continue
                value = to_torch(self.checkpoint.param(name))
                value = value.to(tensor.dtype) if tensor.is_floating_point() else value
                is_parameter = isinstance(tensor, torch.nn.Parameter)
                table[key] = torch.nn.Parameter(value, requires_grad=False) if is_parameter else value


def _computed_here(module: Any) -> bool:
    """Whether it is an experts module of the usual form, whose experts are read one by one."""
    return hasattr(module, "is_transposed") and not getattr(module, "has_post_expert_norm", False)


@functools.cache
def _zero(dtype: torch.dtype) -> torch.Tensor:
    return torch.zeros((), dtype=dtype)


def _empty(parameter: torch.Tensor) -> torch.nn.Parameter:
    """A parameter of the same shape that takes no memory."""
    return torch.nn.Parameter(_zero(parameter.dtype).expand(parameter.shape), requires_grad=False)


def _pieces(model: Any) -> Iterator[tuple[str, Any, bool]]:
    """(name, module, whole) of what is loaded at a time: decoder layers whole, else single modules."""
    layers: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(layer) for layer in layers):
            continue
        if isinstance(module, torch.nn.ModuleList):
            layers += [f"{name}.{i}" for i in range(len(module))]
            yield from ((f"{name}.{i}", child, True) for i, child in enumerate(module))
        elif module._parameters or module._buffers:
            yield name, module, False


_RUNNING: contextvars.ContextVar[StreamedModel] = contextvars.ContextVar("running model")
# A model is made for registered names only, so the hooks stay registered and ask which model is running.
ALL_ATTENTION_FUNCTIONS.register(_NAME, lambda *args, **options: _RUNNING.get()._attend(*args, **options))
ALL_MASK_ATTENTION_FUNCTIONS.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
ALL_EXPERTS_FUNCTIONS.register(_NAME, lambda *args: _RUNNING.get()._experts(*args))
