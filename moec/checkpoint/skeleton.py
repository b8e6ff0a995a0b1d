"""Models that cost no memory: built on the meta device, or with parameters that share one zero.

A captured graph needs shapes and names only. A zero-storage parameter is `zeros(()).expand(shape)`: real
enough for torch.export, 0 bytes for a 47 B model. Buffers that are computed (inverse frequencies) hold
their real values.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Silences transformers' advice and progress bars while a model is being built."""
    from transformers.utils import logging

    level, bars = logging.get_verbosity(), logging.is_progress_bar_enabled()
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.set_verbosity(level)
        if bars:
            logging.enable_progress_bar()


def meta_model(config: Any, **kwargs: Any) -> Any:
    """The causal language model of `config` on the meta device: names and shapes only."""
    from transformers import AutoModelForCausalLM

    with quiet(), torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, **kwargs).eval()


def zero_storage_model(config: Any, dtype: torch.dtype = torch.float32, **kwargs: Any) -> Any:
    """The model with zero-storage parameters (all zero: results mean nothing) and real buffers."""
    model = meta_model(config, dtype=dtype, **kwargs)
    for module in model.modules():
        for name, param in module._parameters.items():
            if param is not None:
                module._parameters[name] = _zero_parameter(param)
        _make_buffers(module)
    model.tie_weights()
    model.initialize_weights()  # fills the computed buffers; parameters are flagged as done
    return model.eval()


def _zero_parameter(param: torch.nn.Parameter) -> torch.nn.Parameter:
    zero = torch.zeros((), dtype=param.dtype).expand(param.shape)
    new = torch.nn.Parameter(zero, requires_grad=False)
    new._is_hf_initialized = True
    return new


def _make_buffers(module: torch.nn.Module) -> None:
    for name, buffer in module._buffers.items():
        if buffer is None or not buffer.is_meta:
            continue
        new = torch.zeros(buffer.shape, dtype=buffer.dtype)
        if name not in module._non_persistent_buffers_set:
            new._is_hf_initialized = True  # comes from the checkpoint
        module._buffers[name] = new


def expert_parameters(model: Any) -> list[str]:
    """Names of the stacked expert weights `[E, ...]`; empty when the model is dense."""
    return [n for n, p in model.named_parameters() if "expert" in n and p.dim() == 3]
