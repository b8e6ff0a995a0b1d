"""The engine stage of a build: rewritten graph and packed files in, `engine.plan` and its tables out."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import onnx_ir as ir

from moec.compile.checks import load_graph
from moec.compile.compiler import OnProgress, compile_engine
from moec.compile.lowering import lower
from moec.compile.memory_plan import (
    EngineBinding,
    MemoryPlan,
    binding_table,
    check_recorded,
    memory_plan,
    to_json,
)
from moec.compile.places import places_in
from moec.compile.report import EngineReport
from moec.compile.targets import Targets

PLANS = {"tensorrt_rtx": "engine.plan", "tensorrt": "engine_tensorrt.plan"}
DEFAULT_CHUNK = 128


@dataclass(frozen=True)
class Engine:
    """One engine of a bundle: its report, its binding table and the device memory it needs."""

    module: str
    report: EngineReport
    bindings: tuple[EngineBinding, ...]
    memory: MemoryPlan

    def to_manifest(self) -> dict[str, Any]:
        """What the manifest keeps: enough to bind and run the plan."""
        return {
            "file": self.report.plan,
            "module": self.module,
            "tensorrt": self.report.tensorrt,
            "targets": list(self.report.targets),
            "sha256": self.report.plan_sha256,
            "profiles": [profile.name for profile in self.report.profiles],
            "memory": asdict(self.memory),
            "bindings": to_json(self.bindings),
        }

    def to_report(self) -> dict[str, Any]:
        """What `build_report.json` keeps."""
        return self.report.to_json() | {"memory": asdict(self.memory)}


def build_engines(
    rewritten: ir.Model,
    folder: Path,
    targets: Targets,
    *,
    batch: int,
    chunk: int = DEFAULT_CHUNK,
    dtype: str = "fp16",
    dump_dir: Path | None = None,
    on_progress: OnProgress | None = None,
) -> list[Engine]:
    """Build the engines of a bundle.

    Args:
        rewritten: The graph after `pipeline.MOEC_PASSES`; left as it is.
        folder: The bundle's folder, with weights.safetensors, experts.moex and calibration.safetensors. The
            plans are written there.
        targets: From `targets.parse_targets`; nothing is done for `cpu`.
        batch: Slots.
        chunk: Tokens of a prefill step.
        dtype: Activations: fp16 | bf16.
        dump_dir: Keep lowered.onnx and the build log there; otherwise the log is kept only of a failure.
        on_progress: See compiler.OnProgress.

    Raises:
        MoecError: with the node or plugin at fault and the log's path.
    """
    if targets.cpu_only:
        return []
    places = places_in(folder)
    lowered = lower(rewritten, places.weights, dtype)
    with _work_folder(dump_dir) as work:
        graph = work / "lowered.onnx"
        lowered.save(graph)
        table = binding_table(load_graph(graph), lowered.carriers, places, batch, chunk)
        return [
            _engine(module, archs, graph, folder, table, batch, chunk, on_progress)
            for module, archs in targets.engines.items()
        ]


def _engine(
    module: str,
    archs: Sequence[str],
    graph: Path,
    folder: Path,
    table: Sequence[EngineBinding],
    batch: int,
    chunk: int,
    on_progress: OnProgress | None,
) -> Engine:
    plan = folder / PLANS[module]
    log = graph.with_name(f"{plan.stem}.log")
    report = compile_engine(
        graph, archs, plan, batch=batch, chunk=chunk, module=module, log=log, on_progress=on_progress
    )
    check_recorded(table, report.bindings)
    return Engine(module, report, tuple(table), memory_plan(table, report))


@contextmanager
def _work_folder(dump_dir: Path | None) -> Iterator[Path]:
    """`dump_dir`, or a folder that is removed after success and kept (for its log) after a failure."""
    if dump_dir is not None:
        dump_dir.mkdir(parents=True, exist_ok=True)
        yield dump_dir
        return
    folder = Path(tempfile.mkdtemp(prefix="moec-engine-"))
    try:
        yield folder
    except KeyboardInterrupt:
        shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)
