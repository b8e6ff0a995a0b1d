"""The cache stage of a build: every layer's format, and its calibration."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy
import xxhash

from moec.builder.options import AUTO, BuildOptions
from moec.bundle.geometry import Geometry
from moec.bundle.writer import write_bytes
from moec.calibrate import calibrate
from moec.calibrate.budget import LADDER, LAYER_LIMIT, Choice, choose
from moec.calibrate.importance import InputPower
from moec.calibrate.text import DEFAULT_TEXT
from moec.checkpoint import Checkpoint
from moec.progress import Progress, Task
from moec.reference.kv_layout import KVLayout

CALIBRATION = "calibration.safetensors"
CPU_ONLY_KV = ("fp32",)
Tensors = Mapping[str, np.ndarray]


def layouts_of(geometry: Geometry, options: BuildOptions) -> dict[int, KVLayout]:
    """The cache layout of every attention layer; with `auto` the one that layers are raised from."""
    format = LADDER[0] if options.kv == AUTO else options.kv
    return {
        a.layer: KVLayout(format, a.num_kv_heads, a.k_dim, a.v_dim, options.context, window=a.window)
        for a in geometry.attention
    }


def choose_layouts(
    checkpoint: Checkpoint,
    geometry: Geometry,
    options: BuildOptions,
    progress: Progress,
    inputs: InputPower | None = None,
) -> Choice:
    """The formats of `--kv auto`; fills `inputs` too.

    Raises:
        MoecError: unusable text, or a layer that computes NaN.
    """
    texts = options.calibration or (DEFAULT_TEXT,)
    with progress.phase("Choosing cache formats") as task:
        choice = choose(
            checkpoint, geometry, layouts_of(geometry, options), options.kv_budget, texts,
            *_progress_of(task), inputs=inputs,
        )  # fmt: skip
        task.note(f"{len(choice.raised)} of {len(choice.layouts)} layers raised, KL {choice.divergence:.4f}")
    if choice.raised:
        progress.info(f"  raised above {LADDER[0]}: {raised_layers(choice.raised)}")
    if choice.divergence > options.kv_budget:
        progress.warn(f"the cache's KL is {choice.divergence:.4f}, above --kv-budget {options.kv_budget}")
    return choice


def _progress_of(task: Task) -> tuple[Callable[[int, int], None], Callable[[str], None]]:
    """What `choose` reports to: layers of a run, and what the run is for."""
    doing = ""

    def on_note(text: str) -> None:
        nonlocal doing
        doing = text
        task.note(text)

    return lambda done, total: task.note(f"{doing}, layer {done} of {total}"), on_note


def raised_layers(raised: Mapping[int, str]) -> str:
    """'k4v2: layers 0, 3; fp16: layer 7'."""
    by_format: dict[str, list[int]] = {}
    for layer, format in sorted(raised.items()):
        by_format.setdefault(format, []).append(layer)
    parts = []
    for format in sorted(by_format, key=LADDER.index):
        layers = by_format[format]
        parts.append(f"{format}: layer{'s' if len(layers) > 1 else ''} {', '.join(map(str, layers))}")
    return "; ".join(parts)


def choice_report(choice: Choice, budget: float) -> dict[str, Any]:
    """For build_report.json."""
    layers = [
        {"layer": layer, "format": choice.layouts[layer].format, "errors": choice.errors[layer]}
        for layer in sorted(choice.errors)
    ]
    rounds = [{"raised": count, "divergence": value} for count, value in choice.rounds]
    raised = {str(layer): format for layer, format in sorted(choice.raised.items())}
    result = {"budget": budget, "divergence": choice.divergence, "raised": raised}
    return result | {"layers": layers, "rounds": rounds}


def calibrate_stage(
    checkpoint: Checkpoint,
    geometry: Geometry,
    layouts: Mapping[int, KVLayout],
    options: BuildOptions,
    progress: Progress,
    inputs: InputPower | None = None,
) -> tuple[Tensors, dict[int, float]]:
    """The calibration tensors of these layouts, and the error of attention by layer; warns of broken layers.

    Fills `inputs` too.

    Raises:
        MoecError: unusable text, or a layer that computes NaN.
    """
    with progress.phase("Calibrating", total=1) as task:
        texts = options.calibration or (DEFAULT_TEXT,)
        errors: dict[int, float] = {}
        tensors = calibrate(
            checkpoint, geometry, layouts, texts, _layers_done(task), errors.__setitem__, inputs
        )
        if inputs is None and not any(layout.quantized for layout in layouts.values()):
            task.note(f"not needed for {options.kv} and {options.weights}")
    if bad := {layer: error for layer, error in errors.items() if error > LAYER_LIMIT}:
        listed = ", ".join(f"{layer} ({100 * error:.0f} %)" for layer, error in sorted(bad.items()))
        progress.warn(f"{options.kv} is too coarse for the attention of layers {listed}: use --kv auto")
    return tensors, errors


def _layers_done(task: Task) -> Callable[[int, int], None]:
    def on_progress(done: int, total: int) -> None:
        task.advance(1 / total)
        task.note(f"{done} of {total} layers")

    return on_progress


def write_calibration(folder: Path, tensors: Tensors, options: BuildOptions, used: bool) -> None:
    """Write calibration.safetensors, with the names and hashes of the texts if they were used."""
    texts = (options.calibration or (DEFAULT_TEXT,)) if used else ()
    sources = [{"name": t.name, "xxh64": xxhash.xxh64_hexdigest(t.read_bytes())} for t in texts]
    data = safetensors.numpy.save(
        {name: np.ascontiguousarray(value) for name, value in sorted(tensors.items())},
        {"texts": json.dumps(sources)},  # one key: the library writes several in random order
    )
    write_bytes(folder / CALIBRATION, data)
