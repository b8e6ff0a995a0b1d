"""Which cache format each layer needs for an error budget (`--kv auto`).

Every layer starts as mkv2. Errors of attention outputs are measured layer by layer on text that the
calibration did not see; the divergence of the whole model's predictions (mean KL, as decoding over the cache
computes them) is measured end to end. Layers are raised where a byte buys the largest decrease of squared
error, until the measured divergence is within the budget.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from moec.bundle.geometry import Geometry
from moec.calibrate.importance import InputPower
from moec.calibrate.run import (
    AttentionCall,
    OnProgress,
    TextWindows,
    attention_layer,
    fit_layers,
    named_tensors,
    observe,
    read_windows,
    relative_error,
)
from moec.calibrate.statistics import LayerStatistics
from moec.checkpoint import Checkpoint
from moec.reference.kv_cache import Calibration
from moec.reference.kv_layout import KVLayout

DEFAULT_BUDGET = 0.05
LAYER_LIMIT = 0.35
LADDER = ("mkv2", "k4v2", "int8", "fp16")
_MAX_ROUNDS = 6
Layouts = dict[int, KVLayout]
OnNote = Callable[[str], None]


@dataclass
class Choice:
    """A format for every layer.

    Attributes:
        layouts, tensors: By layer, and the calibration tensors that belong to them.
        divergence: Mean KL in nats of the model over this cache from the model over an exact one, on
            calibration text that was held back.
        errors: Relative error of attention outputs by layer and format.
        raised: Layers above mkv2 and their formats.
        rounds: (layers raised, divergence) of every measurement.
    """

    layouts: Layouts
    tensors: dict[str, np.ndarray]
    divergence: float
    errors: dict[int, dict[str, float]]
    raised: dict[int, str] = field(default_factory=dict)
    rounds: list[tuple[int, float]] = field(default_factory=list)


def choose(
    checkpoint: Checkpoint,
    geometry: Geometry,
    layouts: Mapping[int, KVLayout],
    budget: float = DEFAULT_BUDGET,
    text_files: Sequence[str | Path] | None = None,
    on_progress: OnProgress | None = None,
    on_note: OnNote = lambda note: None,
    ladder: Sequence[str] = LADDER,
    inputs: InputPower | None = None,
) -> Choice:
    """The smallest caches that hold the budget.

    Args:
        checkpoint: The opened checkpoint.
        geometry: Its shapes.
        layouts: mkv2 layouts of all attention layers (windowed ones stay as they are).
        budget: Largest mean KL, in nats.
        text_files: UTF-8 files; None takes the shipped text.
        on_progress: Called with (decoder layers done, all) in every run of the model.
        on_note: Called with what is being done.
        ladder: Formats from the smallest on, the last one fp16.
        inputs: Also filled with the inputs of every weight.

    Raises:
        MoecError: unusable text or tokenizer, or a layer that computes NaN.
    """
    text = read_windows(checkpoint, geometry, text_files)
    on_note("observing keys and values")
    statistics = observe(checkpoint, layouts, text.calibration, on_progress, inputs=inputs)
    search = _Search(checkpoint, geometry, dict(layouts), statistics, text, on_progress, on_note)
    search.ladder = tuple(ladder)
    return search.run(budget)


class _Search:
    def __init__(
        self,
        checkpoint: Checkpoint,
        geometry: Geometry,
        layouts: Layouts,
        statistics: Mapping[int, LayerStatistics],
        text: TextWindows,
        on_progress: OnProgress | None,
        on_note: OnNote,
    ) -> None:
        self.geometry, self.layouts, self.statistics = geometry, layouts, statistics
        self.model = CachedModel(checkpoint, geometry, on_progress)
        self.ids, self.on_note = text.held_back, on_note
        self.errors: dict[int, dict[str, float]] = {}
        self.ladder: Sequence[str] = LADDER

    def run(self, budget: float) -> Choice:
        self.on_note("measuring the error of every layer")
        candidates = [_in_format(self.layouts, f) for f in self.ladder if f != "fp16"]
        fits = [(x, fit_layers(self.geometry, x, self.statistics)) for x in candidates]
        reference, self.errors = self.model.reference(self.ids, fits)
        self._raise_broken_layers()
        rounds: list[tuple[int, float]] = []
        while True:
            calibrations = fit_layers(self.geometry, self.layouts, self.statistics)
            divergence = self.model.divergence(self.ids, reference, self.layouts, calibrations)
            rounds.append((len(self._raised()), divergence))
            self.on_note(f"KL {divergence:.4f} with {len(self._raised())} layers raised")
            if divergence <= budget or not self._raise_layers(divergence, budget, len(rounds)):
                break
        return Choice(
            self.layouts, named_tensors(calibrations), divergence, self.errors, self._raised(), rounds
        )

    def _raised(self) -> dict[int, str]:
        return {
            layer: x.format
            for layer, x in self.layouts.items()
            if layer in self.errors and x.format != self.ladder[0]
        }

    def _error(self, layer: int, format: str) -> float:
        return self.errors[layer].get(format, 0.0)

    def _total(self) -> float:
        return sum(self._error(layer, self.layouts[layer].format) ** 2 for layer in self.errors)

    def _raise_broken_layers(self) -> None:
        """A layer far off is raised whatever the budget: the mean over a text may hide it."""
        for layer, errors in self.errors.items():
            good = next(f for f in self.ladder if errors.get(f, 0.0) <= LAYER_LIMIT)
            self.layouts[layer] = _as(self.layouts[layer], good)

    def _raise_layers(self, divergence: float, budget: float, round: int) -> bool:
        """Raises what should be enough if the divergence is proportional to the squared errors."""
        target = 0.9 * budget / divergence * self._total() if round < _MAX_ROUNDS else 0.0
        steps = 0
        while self._total() > target and (best := self._best_step()):
            layer, format = best
            self.layouts[layer] = _as(self.layouts[layer], format)
            steps += 1
        return steps > 0

    def _best_step(self) -> tuple[int, str] | None:
        options = [
            (self._gain(layer, format), -layer, format)
            for layer in self.errors
            for format in self.ladder[self.ladder.index(self.layouts[layer].format) + 1 :]
        ]
        if not options:
            return None
        _, layer, format = max(options)
        return -layer, format

    def _gain(self, layer: int, format: str) -> float:
        """Decrease of squared error a byte."""
        old = self.layouts[layer]
        less = self._error(layer, old.format) ** 2 - self._error(layer, format) ** 2
        return less / (_as(old, format).bytes_allocated(1) - old.bytes_allocated(1))


class CachedModel:
    """The model in fp32 over caches in any format, with decode-exact attention."""

    def __init__(self, checkpoint: Checkpoint, geometry: Geometry, on_progress: OnProgress | None) -> None:
        from moec.calibrate.streaming import StreamedModel

        self.geometry, self.model = geometry, StreamedModel(checkpoint, on_progress)

    def reference(
        self, ids: np.ndarray, fits: Sequence[tuple[Mapping[int, KVLayout], Mapping[int, Calibration]]]
    ) -> tuple[Any, dict[int, dict[str, float]]]:
        """Log-probabilities over an exact cache, and what each candidate's attention would be off.

        Args:
            ids: Windows int64 `[n,S]`.
            fits: (layouts, calibrations) of candidates.

        Returns:
            float32 torch tensor `[n,S/2,V]` of the second halves; relative L2 error by layer and format.
        """
        from moec.calibrate.streaming import eager

        squares: dict[tuple[int, str], np.ndarray] = {}

        def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
            out, number = eager(module, query, key, value, mask, **options), module.layer_idx
            call = AttentionCall(query, key, value, out, options.get("s_aux"))
            for layouts, calibrations in fits:
                layout = layouts[number]
                if layout.quantized:
                    sums = call.squares(attention_layer(self.geometry, number), layout, calibrations[number])
                    squares[number, layout.format] = squares.get((number, layout.format), 0) + sums
            return out

        logits = self._logits(ids, attention)
        errors: dict[int, dict[str, float]] = {}
        for (number, format), sums in sorted(squares.items()):
            errors.setdefault(number, {})[format] = relative_error(sums)
        return logits, errors

    def divergence(
        self,
        ids: np.ndarray,
        reference: Any,
        layouts: Mapping[int, KVLayout],
        calibrations: Mapping[int, Calibration],
    ) -> float:
        """Mean KL(reference || model over these caches) in nats, on the second half of every window."""
        from moec.calibrate.streaming import eager

        def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
            number = module.layer_idx
            if not layouts[number].quantized:
                return eager(module, query, key, value, mask, **options)
            call = AttentionCall(query, key, value, None, options.get("s_aux"))
            return call.cached(attention_layer(self.geometry, number), layouts[number], calibrations[number])

        logits = self._logits(ids, attention)
        parts = [((r.exp() * (r - x)).sum(-1)).mean() for r, x in zip(reference, logits, strict=True)]
        return float(sum(parts) / len(parts))

    def _logits(self, ids: np.ndarray, attention: Any) -> Any:
        import torch

        self.model.attention = attention
        logits = self.model.logits(torch.from_numpy(ids), max(1, ids.shape[1] // 2))
        return torch.log_softmax(logits, -1)


def _as(layout: KVLayout, format: str) -> KVLayout:
    return replace(layout, format=format, promoted=None)


def _in_format(layouts: Layouts, format: str) -> Layouts:
    return {layer: _as(x, format) if x.quantized else x for layer, x in layouts.items()}
