"""Activations are told apart by what they compute."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from moec.errors import MoecError
from moec.frontend.activation import activation_of


def _module(act, gated=True, concatenated=True, gate=None, **extra):
    def default_gate(x):
        g, u = x.chunk(2, -1) if concatenated else (x[..., ::2], x[..., 1::2])
        return act(g) * u

    return SimpleNamespace(
        has_gate=gated, is_concatenated=concatenated, act_fn=act, _apply_gate=gate or default_gate, **extra
    )


CASES = {
    "silu": F.silu,
    "gelu": F.gelu,
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "relu2": lambda x: F.relu(x).square(),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("concatenated", [True, False])
def test_plain(name, gated, concatenated):
    assert activation_of(_module(CASES[name], gated, concatenated)).name == name


def test_clamped_swiglu_keeps_its_constants():
    def gate(x):
        g, u = x[..., ::2].clamp(max=5.0), x[..., 1::2].clamp(-5.0, 5.0)
        return (u + 1) * g * torch.sigmoid(1.5 * g)

    form = activation_of(_module(F.silu, concatenated=False, gate=gate, alpha=1.5, limit=5.0))
    assert (form.name, form.alpha, form.limit) == ("swiglu_oai", 1.5, 5.0)


def test_what_has_no_name_is_refused():
    with pytest.raises(MoecError, match="activation"):
        activation_of(_module(torch.tanh))
    with pytest.raises(MoecError, match="norm"):
        activation_of(_module(F.silu, has_post_expert_norm=True))
