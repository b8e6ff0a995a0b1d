"""Random inputs of PipelinedMoE and Experts."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from moec.reference.experts import BlobLayout, ExpertWeights, pack_expert
from tests.helpers.ties import decided_rows

F32 = np.float32
RESIDENT = dict(residency=np.zeros(1, np.int32), staging=np.zeros((1, 1), np.int8))


@dataclass
class MoeCase:
    """Weights of a layer with `attributes` of the operator beyond its shape."""

    rng: np.random.Generator
    hidden_size: int = 192
    intermediate_size: int = 96
    num_experts: int = 6
    top_k: int = 3
    weight_format: str = "int4"
    gated: bool = True
    has_bias: bool = False
    extra: dict = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.layout = BlobLayout(
            self.weight_format, self.hidden_size, self.intermediate_size, self.gated, self.has_bias
        )
        self.blobs = np.stack([pack_expert(self.layout, self._expert()) for _ in range(self.num_experts)])
        self.router_weight = self._normal(self.num_experts, self.hidden_size)
        self.router_bias = self._normal(self.num_experts)
        self.selection_bias = F32(0.1) * self._normal(self.num_experts)

    def _normal(self, *shape: int) -> np.ndarray:
        return self.rng.standard_normal(shape).astype(F32)

    def _expert(self) -> ExpertWeights:
        rows = self.layout.gate_up_rows
        biases = (self._normal(rows), self._normal(self.hidden_size)) if self.has_bias else (None, None)
        gate_up = self._normal(rows, self.hidden_size) / F32(self.hidden_size**0.5)
        down = self._normal(self.hidden_size, self.intermediate_size) / F32(self.intermediate_size**0.5)
        return ExpertWeights(gate_up, down, *biases)

    @property
    def attributes(self) -> dict:
        return dict(
            num_experts=self.num_experts, top_k=self.top_k, weight_format=self.weight_format,
            gated=int(self.gated), has_bias=int(self.has_bias), intermediate_size=self.intermediate_size,
            layer=5, **self.extra,
        )  # fmt: skip

    def tokens(self, count: int) -> np.ndarray:
        """Hidden states that the router is not near a tie for."""
        return decided_rows(lambda n: self._normal(n, self.hidden_size), count, self.attributes, vars(self))

    def pipelined(self, hidden: np.ndarray, num_tokens: list[int]) -> dict:
        """Inputs of PipelinedMoE."""
        return dict(
            hidden=hidden, num_tokens=np.array(num_tokens, np.int32), router_weight=self.router_weight,
            router_bias=self.router_bias, selection_bias=self.selection_bias,
            predictor_weight=np.zeros((1, self.hidden_size), F32), experts=self.blobs.view(np.int8),
            **RESIDENT,
        )  # fmt: skip

    def experts(self, hidden: np.ndarray, num_tokens: list[int]) -> dict:
        """Inputs of Experts, with random ids (distinct per token) and weights."""
        count = len(hidden)
        ids = np.stack([self.rng.permutation(self.num_experts)[: self.top_k] for _ in range(count)])
        return dict(
            hidden=hidden, num_tokens=np.array(num_tokens, np.int32), ids=ids.astype(np.int32),
            weights=self._normal(count, self.top_k), experts=self.blobs.view(np.int8), **RESIDENT,
        )  # fmt: skip
