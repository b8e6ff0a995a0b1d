"""The engine stage of a build: which targets, and how it shows."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import onnx_ir as ir

from moec.builder.cache import CPU_ONLY_KV
from moec.builder.options import BuildOptions
from moec.compile.plugins import HINT, find_plugin_library, plugin_library
from moec.compile.stage import DEFAULT_CHUNK, Engine, build_engines
from moec.compile.targets import Targets, has_module, parse_targets
from moec.errors import MoecError
from moec.progress import Progress

CPU = Targets({})


def choose_targets(options: BuildOptions, progress: Progress) -> Targets:
    """Targets of `--target`, before anything slow happens.

    `auto` leaves out engines that cannot be built here, with a warning; what is asked for by name must work.

    Raises:
        MoecError: an unknown target, or an engine that this machine or these options do not allow.
    """
    targets = parse_targets(options.target)
    if options.target.strip().lower() == "auto":
        missing = _missing(options)
        if missing is not None:
            progress.warn(f"no GPU engine is built: {missing}")
            return CPU
    elif not targets.cpu_only:
        plugin_library()
        if options.kv in CPU_ONLY_KV:
            raise MoecError(
                f"--kv {options.kv} is for the CPU only", hint="Choose --kv fp16, or --target cpu."
            )
    return targets


def _missing(options: BuildOptions) -> str | None:
    if options.kv in CPU_ONLY_KV:
        return f"--kv {options.kv} is for the CPU only"
    if not has_module("tensorrt_rtx"):
        return "TensorRT-RTX is not installed (pip install tensorrt-rtx)"
    return None if find_plugin_library() else f"the plugin library is missing. {HINT}"


def engine_stage(
    rewritten: ir.Model, folder: Path, targets: Targets, options: BuildOptions, progress: Progress
) -> list[Engine]:
    """Build the engines into `folder`, with a progress bar and the time left.

    Raises:
        MoecError: with the node or plugin at fault and the log's path.
    """
    if targets.cpu_only:
        return []
    with progress.phase("Building the engine", total=1) as task:

        def on_progress(fraction: float, phase: str, left: float | None) -> None:
            task.advance(max(0.0, fraction - task.done))
            task.note(phase if left is None else f"{phase}, {left:.0f} s left")

        engines = build_engines(
            rewritten,
            folder,
            targets,
            batch=options.batch,
            chunk=min(DEFAULT_CHUNK, options.context or DEFAULT_CHUNK),
            dtype=options.dtype,
            dump_dir=options.dump_dir,
            on_progress=on_progress,
        )
        task.note(summary(engines))
    return engines


def summary(engines: Sequence[Engine]) -> str:
    """Size, targets, plugin layers and child's memory of each engine, in one line."""
    return "; ".join(_line(engine) for engine in engines)


def _line(engine: Engine) -> str:
    report = engine.report
    layers = ", ".join(f"{count} {name}" for name, count in report.profiles[0].plugin_layers.items())
    memory = f"{report.peak_rss_bytes / 1e6:.0f} MB of memory"
    return f"{report.plan_bytes / 1e6:.1f} MB for {' '.join(report.targets)}, {layers}, {memory}"
