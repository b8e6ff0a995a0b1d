"""Run calibration text through the model and fit every quantized layer's static tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from moec.bundle.geometry import AttentionLayer, Geometry
from moec.calibrate.fit import fit_layer
from moec.calibrate.importance import InputPower
from moec.calibrate.statistics import LayerStatistics
from moec.calibrate.text import HELD_BACK_WINDOW, WINDOW, divide, read_text, tokenize, windows
from moec.checkpoint import Checkpoint
from moec.errors import MoecError
from moec.reference.kv_cache import Calibration, neutral_calibration
from moec.reference.kv_layout import KVLayout

MAX_HELD_BACK_WINDOWS = 2
OnProgress = Callable[[int, int], None]
OnError = Callable[[int, float], None]
OnLayer = Callable[[int, LayerStatistics, "AttentionCall"], None]


def neutral(layouts: Mapping[int, KVLayout]) -> dict[str, np.ndarray]:
    """Calibration tensors that change nothing, for fp and windowed layers (which ignore them).

    Returns:
        `kv.{layer}.k_mean`, `.k_ref`, `.k_order`, `.v_ref` for every layer of `layouts`.
    """
    return named_tensors({layer: neutral_calibration(layout) for layer, layout in layouts.items()})


def named_tensors(calibrations: Mapping[int, Calibration]) -> dict[str, np.ndarray]:
    """Calibrations by layer -> `kv.{layer}.k_mean`, `.k_ref`, `.k_order`, `.v_ref`."""
    fields = ("k_mean", "k_ref", "k_order", "v_ref")
    return {f"kv.{layer}.{f}": getattr(c, f) for layer, c in calibrations.items() for f in fields}


def calibrate(
    checkpoint: Checkpoint,
    geometry: Geometry,
    layouts: Mapping[int, KVLayout],
    text_files: Sequence[str | Path] | None = None,
    on_progress: OnProgress | None = None,
    on_error: OnError | None = None,
    inputs: InputPower | None = None,
) -> dict[str, np.ndarray]:
    """Calibration tensors of every layer, fitted on text.

    The model runs in fp32 over at most 16 windows of 512 tokens, one decoder layer in memory at a time; a
    hook behind RoPE sees q, k and v. Layers without quantized blocks get neutral tensors; without any, and
    without `inputs`, nothing is run.

    Args:
        checkpoint: The opened checkpoint.
        geometry: Its shapes.
        layouts: Cache layout of each attention layer.
        text_files: UTF-8 files; None takes the shipped text.
        on_progress: Called with (decoder layers done, decoder layers in all).
        on_error: Called with (layer, relative L2 error of its attention output over this cache), as measured
            on the last window, for layers with blocks.
        inputs: Also filled with the inputs of every weight.

    Returns:
        `kv.{layer}.k_mean` f32 `[Hkv,Dk]`, `.k_ref` f32, `.k_order` i32 (all in permuted order),
        `.v_ref` f32 `[Hkv,ng]`.

    Raises:
        MoecError: unusable text or tokenizer, or a layer that computes NaN.
    """
    if inputs is None and not any(layout.quantized for layout in layouts.values()):
        return neutral(layouts)
    text = read_windows(checkpoint, geometry, text_files)
    fitted: dict[int, Calibration] = {}

    def on_layer(layer: int, seen: LayerStatistics, call: AttentionCall) -> None:
        attention = attention_layer(geometry, layer)
        fitted[layer] = fit_layer(seen, centre=not attention.softcap)
        if on_error is not None:
            on_error(layer, call.error(attention, layouts[layer], fitted[layer]))

    observe(checkpoint, layouts, text.calibration, on_progress, on_layer, inputs)
    plain = {layer: neutral_calibration(layout) for layer, layout in layouts.items() if layer not in fitted}
    return named_tensors(plain | fitted)


@dataclass(frozen=True)
class TextWindows:
    """Windows of token ids, int64 `[n,S]`: what is fitted on, and text that the fit does not see."""

    calibration: np.ndarray
    held_back: np.ndarray


def read_windows(
    checkpoint: Checkpoint, geometry: Geometry, text_files: Sequence[str | Path] | None
) -> TextWindows:
    """The text by the checkpoint's tokenizer, cut into windows.

    Raises:
        MoecError: unusable text or tokenizer.
    """
    ids = tokenize(checkpoint.path, read_text(text_files))
    fitted, held_back = divide(ids)
    size = min(WINDOW, geometry.max_context)
    longer = min(HELD_BACK_WINDOW, geometry.max_context)
    return TextWindows(
        np.stack(windows(fitted, size, geometry.vocab_size)),
        np.stack(windows(held_back, longer, geometry.vocab_size, MAX_HELD_BACK_WINDOWS)),
    )


def observe(
    checkpoint: Checkpoint,
    layouts: Mapping[int, KVLayout],
    ids: np.ndarray,
    on_progress: OnProgress | None = None,
    on_layer: OnLayer | None = None,
    inputs: InputPower | None = None,
) -> dict[int, LayerStatistics]:
    """Statistics of every layer with blocks over windows int64 `[n,S]`.

    All windows go through a layer before the next one runs: `on_layer` is called with the layer, its
    complete statistics and the attention call of the last window. `inputs` is filled if it is given.

    Raises:
        MoecError: a layer computes NaN or infinity.
    """
    import torch

    from moec.calibrate.streaming import StreamedModel, eager

    statistics = {layer: LayerStatistics(x) for layer, x in layouts.items() if x.quantized}
    model = StreamedModel(checkpoint, on_progress)
    model.on_input = inputs.add if inputs is not None else None
    windows_seen = dict.fromkeys(statistics, 0)

    def attention(module: Any, query: Any, key: Any, value: Any, mask: Any, **options: Any) -> Any:
        out, layer = eager(module, query, key, value, mask, **options), module.layer_idx
        if layer in statistics:
            seen = statistics[layer]
            seen.add(*arrays(seen.layout, query, key, value))
            _check(layer, seen)
            windows_seen[layer] += 1
            if on_layer is not None and windows_seen[layer] == len(ids):
                on_layer(layer, seen, AttentionCall(query, key, value, out, options.get("s_aux")))
        return out

    model.attention = attention
    model.hidden(torch.from_numpy(ids))
    return statistics


@dataclass(frozen=True)
class AttentionCall:
    """One window at a layer, torch tensors: q, k, v `[1,H,S,D]`, out `[1,S,Hq,Dv]`, sinks `[Hq]`."""

    query: Any
    key: Any
    value: Any
    out: Any
    sinks: Any = None

    def cached(self, layer: AttentionLayer, layout: KVLayout, calibration: Calibration) -> Any:
        """What attention over a cache gives instead of `out`."""
        import torch

        from moec.calibrate.simulate import cached_attention

        sinks = self.sinks.float().numpy() if layer.has_sink_logits else None
        q, k, v = arrays(layout, self.query, self.key, self.value)
        out = torch.from_numpy(cached_attention(layer, layout, calibration, q, k, v, sinks))
        return out.transpose(0, 1)[None]

    def squares(self, layer: AttentionLayer, layout: KVLayout, calibration: Calibration) -> np.ndarray:
        """Sums of squares `[2]` of the cached output's error and of the output."""
        off = self.cached(layer, layout, calibration) - self.out
        return np.array([float(off.square().sum()), float(self.out.square().sum())])

    def error(self, layer: AttentionLayer, layout: KVLayout, calibration: Calibration) -> float:
        """Relative L2 error of the cached output."""
        return relative_error(self.squares(layer, layout, calibration))


def relative_error(squares: np.ndarray) -> float:
    """The square root of their quotient."""
    return float(np.sqrt(squares[0] / max(squares[1], 1e-30)))


def arrays(layout: KVLayout, query: Any, key: Any, value: Any) -> Iterable[np.ndarray]:
    """One window's tensors `[1,H,S,D]` as float32 `[H,S,D]`; padding that some families add is cut off."""
    parts = query, key[..., : layout.k_dim], value[..., : layout.v_dim]
    return (x[0].float().numpy() for x in parts)


def fit_layers(
    geometry: Geometry, layouts: Mapping[int, KVLayout], statistics: Mapping[int, LayerStatistics]
) -> dict[int, Calibration]:
    """The calibration of every layer for its layout; neutral where it has no blocks."""
    result = {}
    for layer, layout in layouts.items():
        if layout.quantized:
            centre = not attention_layer(geometry, layer).softcap
            result[layer] = fit_layer(statistics[layer], layout=layout, centre=centre)
        else:
            result[layer] = neutral_calibration(layout)
    return result


def attention_layer(geometry: Geometry, layer: int) -> AttentionLayer:
    """The attention layer with that index."""
    return next(a for a in geometry.attention if a.layer == layer)


def _check(layer: int, seen: LayerStatistics) -> None:
    if not seen.is_finite():
        raise MoecError("The model computes NaN or infinity on the calibration text", where=f"layer {layer}")
