"""Run calibration text through the transformers model and fit every quantized layer's static tensors."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from moec.bundle.geometry import Geometry
from moec.calibrate.fit import fit_layer
from moec.calibrate.statistics import LayerStatistics
from moec.calibrate.text import WINDOW, read_text, tokenize, windows
from moec.checkpoint import Checkpoint
from moec.errors import MoecError
from moec.reference.kv_cache import Calibration, neutral_calibration
from moec.reference.kv_layout import KVLayout

_HOOK = "moec_calibrate"
OnProgress = Callable[[int, int], None]


def neutral(layouts: Mapping[int, KVLayout]) -> dict[str, np.ndarray]:
    """Calibration tensors that change nothing, for fp and windowed layers (which ignore them).

    Returns:
        `kv.{layer}.k_mean`, `.k_ref`, `.k_order`, `.v_ref` for every layer of `layouts`.
    """
    return _named({layer: neutral_calibration(layout) for layer, layout in layouts.items()})


def calibrate(
    checkpoint: Checkpoint,
    geometry: Geometry,
    layouts: Mapping[int, KVLayout],
    text_files: Sequence[str | Path] | None = None,
    on_progress: OnProgress | None = None,
) -> dict[str, np.ndarray]:
    """Calibration tensors of every layer, fitted on text.

    The model runs in fp32 with eager attention over at most 16 windows of 512 tokens; a hook behind RoPE
    sees q, k and v. Layers without quantized blocks get neutral tensors; without any, nothing is run.

    Args:
        checkpoint: The opened checkpoint.
        geometry: Its shapes.
        layouts: Cache layout of each attention layer.
        text_files: UTF-8 files; None takes the shipped text.
        on_progress: Called with (windows done, windows in all).

    Returns:
        `kv.{layer}.k_mean` f32 `[Hkv,Dk]`, `.k_ref` f32, `.k_order` i32 (all in permuted order),
        `.v_ref` f32 `[Hkv,ng]`.

    Raises:
        MoecError: unusable text or tokenizer, too little memory, or a layer that computes NaN.
    """
    quantized = {layer: layout for layer, layout in layouts.items() if layout.quantized}
    statistics = {layer: LayerStatistics(layout) for layer, layout in quantized.items()}
    if quantized:
        check_memory(checkpoint)
        ids = tokenize(checkpoint.path, read_text(text_files))
        size = min(WINDOW, geometry.max_context)
        _observe(checkpoint, statistics, windows(ids, size, geometry.vocab_size), on_progress)
    soft_capped = {a.layer for a in geometry.attention if a.softcap}
    fitted = {layer: fit_layer(s, centre=layer not in soft_capped) for layer, s in statistics.items()}
    return neutral({k: v for k, v in layouts.items() if k not in quantized}) | _named(fitted)


def check_memory(checkpoint: Checkpoint, meminfo: Path = Path("/proc/meminfo")) -> None:
    """Refuse to load a model in fp32 that the machine has no memory for, instead of being killed.

    Raises:
        MoecError: less memory is available (by Linux' own estimate; elsewhere nothing is checked).
    """
    names = {checkpoint.canonical(name) for name in checkpoint.param_names()}
    needed = 4 * sum(math.prod(checkpoint.shape(name)) for name in names)
    lines = meminfo.read_text().splitlines() if meminfo.is_file() else []
    available = [1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:")]
    if available and available[0] < needed:
        what = f"Calibration runs the model in fp32 and needs {needed / 1e9:.1f} GB of memory"
        hint = "Build on a machine with more memory, or with --kv fp16, which needs no calibration."
        raise MoecError(f"{what}, {available[0] / 1e9:.1f} GB are available", hint=hint)


def _named(calibrations: Mapping[int, Calibration]) -> dict[str, np.ndarray]:
    fields = ("k_mean", "k_ref", "k_order", "v_ref")
    return {f"kv.{layer}.{f}": getattr(c, f) for layer, c in calibrations.items() for f in fields}


def _observe(
    checkpoint: Checkpoint,
    statistics: Mapping[int, LayerStatistics],
    batches: Sequence[np.ndarray],
    on_progress: OnProgress | None,
) -> None:
    import torch

    with _hooked(statistics):
        model = checkpoint.load_torch(attn_implementation=_HOOK)
        body = getattr(model, "model", model)  # logits are not needed
        for done, ids in enumerate(batches, 1):
            with torch.inference_mode():
                body(input_ids=torch.from_numpy(ids)[None], use_cache=False)
            _check(statistics)
            if on_progress is not None:
                on_progress(done, len(batches))


def _check(statistics: Mapping[int, LayerStatistics]) -> None:
    for layer, seen in statistics.items():
        if not seen.is_finite():
            raise MoecError(
                "The model computes NaN or infinity on the calibration text", where=f"layer {layer}"
            )


@contextmanager
def _hooked(statistics: Mapping[int, LayerStatistics]) -> Iterator[None]:
    """Register an attention function that records and then calls the model's own eager attention."""
    from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    def attention(module: Any, query: Any, key: Any, value: Any, *args: Any, **kwargs: Any) -> Any:
        if module.layer_idx in statistics:
            layout = statistics[module.layer_idx].layout
            parts = (query, key[..., : layout.k_dim], value[..., : layout.v_dim])
            statistics[module.layer_idx].add(*(x[0].float().numpy() for x in parts))
        eager = sys.modules[type(module).__module__].eager_attention_forward
        return eager(module, query, key, value, *args, **kwargs)

    ALL_ATTENTION_FUNCTIONS.register(_HOOK, attention)
    ALL_MASK_ATTENTION_FUNCTIONS.register(_HOOK, ALL_MASK_ATTENTION_FUNCTIONS["eager"])
    try:
        yield
    finally:
        ALL_ATTENTION_FUNCTIONS._global_mapping.pop(_HOOK, None)
        ALL_MASK_ATTENTION_FUNCTIONS._global_mapping.pop(_HOOK, None)
