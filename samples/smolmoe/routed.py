"""Routers of the sample: their file, and a dense FFN whose neurons are scaled as the MoE would scale them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from samples.smolmoe.split import SHARED, TOP_K, activations

MATRICES = ("router", "shared_gate", "neuron_scale", "down_in", "down_out")


@dataclass
class Routers:
    """What makes a MoE of the dense model, for all L layers.

    Attributes:
        groups: The expert of every neuron, see split.py; uint8 [L,I].
        router: float32 [L,E,H].
        shared_gate: The gate of the shared expert, float32 [L,H].
        neuron_scale: Factor of every column of down_proj, float32 [L,I].
        down_in, down_out: What is added to down_proj before that, down_out.T @ down_in; float32 [L,R,I] and
            [L,R,H].
    """

    groups: torch.Tensor
    router: torch.Tensor
    shared_gate: torch.Tensor
    neuron_scale: torch.Tensor
    down_in: torch.Tensor
    down_out: torch.Tensor

    def save(self, path: Path) -> None:
        """Write an npz; the matrices as int8 with one float32 scale a row (330 KB for 30 layers)."""
        arrays = {"groups": self.groups.numpy()}
        for name in MATRICES:
            arrays[name], arrays[f"{name}_step"] = _to_int8(getattr(self, name))
        np.savez_compressed(path, **arrays)

    @classmethod
    def load(cls, path: Path) -> Routers:
        """Read what `save` wrote."""
        with np.load(path) as data:
            matrices = [data[name].astype(np.float32) * data[f"{name}_step"] for name in MATRICES]
            return cls(*map(torch.from_numpy, (data["groups"], *matrices)))

    def layers(self) -> Iterator[tuple[torch.Tensor, ...]]:
        """(groups, router, shared_gate, neuron_scale, down_in, down_out) of every layer."""
        return zip(self.groups, *(getattr(self, name) for name in MATRICES), strict=True)


class RoutedMLP(torch.nn.Module):
    """A dense FFN with neurons scaled by their expert's weight (0: not chosen): the MoE, differentiable.

    Attributes:
        factors: Of the last call: experts' weights (mean 1 over the chosen) and the shared gate, [..,E+1].
        balance: Of the last call: the load-balancing term of Switch; 1 where the load is even.
    """

    def __init__(self, mlp: torch.nn.Module, *routing: torch.Tensor) -> None:
        super().__init__()
        self.mlp = mlp
        groups, self.router, self.shared_gate, self.neuron_scale, self.down_in, self.down_out = routing
        self.groups = groups.long()
        self.factors = self.balance = torch.empty(0)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        logits = hidden @ self.router.T
        values, chosen = logits.topk(TOP_K)
        weights = torch.zeros_like(logits).scatter(-1, chosen, values.softmax(-1) * TOP_K)
        gate = 2 * torch.sigmoid(hidden @ self.shared_gate)[..., None]
        self.factors = torch.cat([weights, gate], -1)
        share = (weights.detach() > 0).float().flatten(0, -2).mean(0) / TOP_K
        self.balance = SHARED * (share * logits.softmax(-1).flatten(0, -2).mean(0)).sum()
        neurons = activations(hidden, self.mlp.gate_proj.weight, self.mlp.up_proj.weight)
        scaled = neurons * self.factors[..., self.groups] * self.neuron_scale
        return scaled @ self.mlp.down_proj.weight.T + scaled @ self.down_in.T @ self.down_out

    @classmethod
    @contextmanager
    def installed(cls, model: torch.nn.Module, routers: Routers) -> Iterator[list[RoutedMLP]]:
        """The model computes as the MoE inside this context."""
        layers = model.model.layers
        dense = [layer.mlp for layer in layers]
        routed = [cls(mlp, *routing) for mlp, routing in zip(dense, routers.layers(), strict=True)]
        _set(layers, routed)
        try:
            yield routed
        finally:
            _set(layers, dense)


def _set(layers, mlps) -> None:
    for layer, mlp in zip(layers, mlps, strict=True):
        layer.mlp = mlp


def _to_int8(values: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    array = values.detach().numpy()
    step = np.abs(array).max(-1, keepdims=True) / 127
    step = np.where(step == 0, 1, step).astype(np.float32)
    return np.rint(array / step).astype(np.int8), step
