"""Which activation an experts module computes, found by running its own gate on random numbers."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F

from moec.errors import MoecError


@dataclass(frozen=True)
class Activation:
    """Name in the moec dialect; `alpha` and `limit` are constants of swiglu_oai."""

    name: str
    alpha: float = 1.0
    limit: float = 0.0


_PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x) ** 2,
}


def _swiglu_oai(gate: torch.Tensor, up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1) * gate * torch.sigmoid(alpha * gate)


def activation_of(module: torch.nn.Module) -> Activation:
    """The activation of a module made by transformers' `use_experts_implementation`.

    Raises:
        MoecError: It computes something that the dialect has no name for.
    """
    if getattr(module, "has_post_expert_norm", False):
        raise MoecError(
            "experts with a norm after each expert are not supported", where=type(module).__name__
        )
    x = (
        torch.linspace(-9.0, 9.0, 4 * 64).reshape(64, 4).t().contiguous()
    )  # beyond any clamp, both signs in each half
    x = x[:, torch.randperm(64, generator=torch.Generator().manual_seed(0))]
    with torch.no_grad():
        truth = module._apply_gate(x) if module.has_gate else module.act_fn(x)
        for form, candidate in _candidates(module, x):
            if candidate.shape == truth.shape and torch.allclose(candidate, truth, atol=1e-6):
                return form
    raise MoecError("the experts' activation is not supported", where=type(module).__name__)


def _candidates(module: torch.nn.Module, x: torch.Tensor):
    if not module.has_gate:
        yield from ((Activation(n), f(x)) for n, f in _PLAIN.items())
        return
    gate, up = x.chunk(2, -1) if module.is_concatenated else (x[..., ::2], x[..., 1::2])
    yield from ((Activation(n), f(gate) * up) for n, f in _PLAIN.items())
    form = _fit_swiglu_oai(module)
    if form is not None:
        yield form, _swiglu_oai(gate, up, form.alpha, form.limit)


def _fit_swiglu_oai(module: torch.nn.Module) -> Activation | None:
    """Constants of `(clip(u) + 1) * g * sigmoid(alpha * g)`, read off three points of the module's gate."""
    at = lambda g, u: float(module._apply_gate(_pair(module, g, u)).double().mean())  # noqa: E731
    slope, largest = at(1.0, 0.0), at(1.0, 1e5)
    if not 0.5 < slope < 1.0:
        return None
    alpha, limit = math.log(slope / (1 - slope)), largest / slope - 1
    return Activation("swiglu_oai", _rounded(alpha), _rounded(limit))


def _pair(module: torch.nn.Module, gate: float, up: float) -> torch.Tensor:
    """One token of 64 equal gates and 64 equal ups, in the module's order."""
    pair = torch.tensor([gate, up], dtype=torch.float64)
    return pair.repeat_interleave(64)[None] if module.is_concatenated else pair.repeat(64)[None]


def _rounded(x: float) -> float:
    return float(f"{x:.6g}")
