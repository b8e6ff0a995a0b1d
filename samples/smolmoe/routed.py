"""Routers of the sample: their file, and a dense FFN whose neurons are scaled as the MoE would scale them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from samples.smolmoe.split import SHARED, TOP_K, activations


@dataclass
class Routers:
    """Of all layers: groups u8 [L,I] (see split.py), router f32 [L,E,H], shared_gate f32 [L,H]."""

    groups: torch.Tensor
    router: torch.Tensor
    shared_gate: torch.Tensor

    def save(self, path: Path) -> None:
        """Write an npz; the matrices as int8 with one float32 scale a row (155 KB for 30 layers)."""
        router, router_scale = _to_int8(self.router)
        gate, gate_scale = _to_int8(self.shared_gate)
        np.savez_compressed(
            path,
            groups=self.groups.numpy(),
            router=router,
            router_scale=router_scale,
            shared_gate=gate,
            shared_gate_scale=gate_scale,
        )

    @classmethod
    def load(cls, path: Path) -> Routers:
        """Read what `save` wrote."""
        with np.load(path) as data:
            router = data["router"].astype(np.float32) * data["router_scale"]
            gate = data["shared_gate"].astype(np.float32) * data["shared_gate_scale"]
            return cls(*(torch.from_numpy(array) for array in (data["groups"], router, gate)))


class RoutedMLP(torch.nn.Module):
    """A dense FFN with neurons scaled by their expert's weight (0: not chosen): the MoE, differentiable."""

    def __init__(self, mlp: torch.nn.Module, *routing: torch.Tensor) -> None:
        super().__init__()
        self.mlp = mlp
        groups, self.router, self.shared_gate = routing
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
        return (neurons * self.factors[..., self.groups]) @ self.mlp.down_proj.weight.T

    @classmethod
    @contextmanager
    def installed(cls, model: torch.nn.Module, routers: Routers) -> Iterator[list[RoutedMLP]]:
        """The model computes as the MoE inside this context."""
        layers = model.model.layers
        dense = [layer.mlp for layer in layers]
        parts = zip(dense, routers.groups, routers.router, routers.shared_gate, strict=True)
        routed = [cls(*part) for part in parts]
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
    scale = np.abs(array).max(-1, keepdims=True) / 127
    scale = np.where(scale == 0, 1, scale).astype(np.float32)
    return np.rint(array / scale).astype(np.int8), scale
