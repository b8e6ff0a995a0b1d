"""How much each input column of a weight matters: the mean square of its activations on text.

Rounding a weight by d changes the output by d*x, so the expected squared error of a row is the sum of
d[c]^2 * E[x[c]^2]: what the int4 quantizer minimises. Measured on the sample model: KL 0.150 -> 0.119.
"""

from __future__ import annotations

from typing import Any

import numpy as np

MIN_TOKENS = 32  # an expert that saw fewer is described by the mean over all experts


class InputPower:
    """Sums of squares by parameter, filled by `StreamedModel.on_input`."""

    def __init__(self) -> None:
        self._dense: dict[str, tuple[np.ndarray, int]] = {}
        self._experts: dict[str, dict[int, tuple[np.ndarray, int]]] = {}
        self._count: dict[str, int] = {}

    def add(self, name: str, x: Any, expert: int | None = None, count: int = 0) -> None:
        """Adds inputs of a parameter.

        Args:
            name: The parameter; for a fused expert parameter with `expert` given.
            x: torch float tensor `[..., K]`.
            expert: Which of the experts, or None.
            count: How many experts there are.
        """
        rows = x.reshape(-1, x.shape[-1])
        new = rows.double().square().sum(0).numpy(), len(rows)
        if expert is None:
            table, key = self._dense, name
        else:
            table, key = self._experts.setdefault(name, {}), expert
            self._count[name] = count
        old = table.get(key)
        table[key] = new if old is None else (old[0] + new[0], old[1] + new[1])

    def importance(self) -> dict[str, np.ndarray]:
        """float32 `[K]` by parameter; for parameters of experts `[E,K]`."""
        result = {name: _mean(*sums) for name, sums in self._dense.items()}
        return result | {name: self._stacked(name, parts) for name, parts in self._experts.items()}

    def _stacked(self, name: str, parts: dict[int, tuple[np.ndarray, int]]) -> np.ndarray:
        total = _mean(sum(s for s, _ in parts.values()), sum(n for _, n in parts.values()))
        rows = [
            _mean(*parts[e]) if e in parts and parts[e][1] >= MIN_TOKENS else total
            for e in range(self._count[name])
        ]
        return np.stack(rows)


def _mean(sums: np.ndarray, count: int) -> np.ndarray:
    """Mean squares; a column that is always zero keeps a little weight, so that no group is without any."""
    mean = sums / max(count, 1)
    return np.maximum(mean, 1e-6 * max(float(mean.mean()), 1e-30)).astype(np.float32)
