"""Compare next-token distributions without holding more than a few rows in double precision."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

ROWS = 64


@dataclass
class Comparison:
    """Sums over positions; `add` texts one by one.

    Attributes:
        loss: Cross-entropy of the candidate, nats a predicted token.
        divergence: KL(reference || candidate), nats a position.
        top1: Share of positions with the same likeliest token.
    """

    predicted: int = 0
    positions: int = 0
    sums: dict[str, float] = field(default_factory=lambda: {"loss": 0.0, "divergence": 0.0, "top1": 0.0})

    def add(self, tokens: np.ndarray, reference: np.ndarray, candidate: np.ndarray) -> None:
        """Logits [S,V] of one text of S tokens; row i predicts token i+1."""
        for start in range(0, len(tokens), ROWS):
            rows = slice(start, start + ROWS)
            expected, got = log_softmax(reference[rows]), log_softmax(candidate[rows])
            self.sums["divergence"] += float((np.exp(expected) * (expected - got)).sum())
            self.sums["top1"] += float((expected.argmax(-1) == got.argmax(-1)).sum())
            next_tokens = tokens[start + 1 : start + 1 + len(got)]
            self.sums["loss"] -= float(got[np.arange(len(next_tokens)), next_tokens].sum())
        self.positions += len(tokens)
        self.predicted += len(tokens) - 1

    @property
    def perplexity(self) -> float:
        return float(np.exp(self.sums["loss"] / self.predicted))

    @property
    def divergence(self) -> float:
        return self.sums["divergence"] / self.positions

    @property
    def top1(self) -> float:
        return self.sums["top1"] / self.positions


def log_softmax(logits: np.ndarray) -> np.ndarray:
    """Of the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
