"""The stages of a build, in order."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from moec.builder.cache import (
    calibrate_stage,
    choice_report,
    choose_layouts,
    layouts_of,
    write_calibration,
)
from moec.builder.caveats import caveats
from moec.builder.engines import choose_targets, engine_stage
from moec.builder.model_files import copy_model_files, generation_defaults, identity
from moec.builder.options import AUTO, BuildOptions, check_context, check_disk, check_options
from moec.builder.plan import remove_plan, write_plan
from moec.builder.report import REPORT, BuildReport, cache_sizes, expert_elements, size_table
from moec.bundle.bindings import bindings_of
from moec.bundle.geometry import Geometry
from moec.bundle.manifest import Manifest, TokenizerFacts
from moec.bundle.writer import BundleWriter, check_free_space, write_bytes
from moec.calibrate import neutral
from moec.calibrate.importance import InputPower
from moec.checkpoint import Checkpoint, open_checkpoint
from moec.compile.stage import Engine
from moec.compile.targets import Targets
from moec.errors import MoecError
from moec.frontend.capture import Captured, capture
from moec.frontend.save import save_exported
from moec.pack.experts_store import checked_bytes, plan_store, store_bytes, write_experts
from moec.pack.graph_weights import WEIGHTS, bind_weights, plans_for
from moec.pack.weights import TensorPlan, plan_weights, write_weights
from moec.progress import Progress
from moec.reference.kv_layout import KVLayout
from moec.reference.store import StoreHeader
from moec.reference.weights import GROUP_SIZE
from moec.rewrite import pipeline
from moec.version import __version__

GRAPH, EXPERTS = "model.onnx", "experts.moex"
PathLike = str | os.PathLike[str]


def build(
    model: PathLike,
    output: PathLike,
    *,
    context: int | None = None,
    batch: int = 4,
    kv: str = "mkv2",
    kv_budget: float | None = None,
    weights: str = "int4",
    experts: str = "int4",
    calibration: PathLike | Sequence[PathLike] | None = None,
    target: str = "auto",
    dtype: str = "fp16",
    dump_dir: PathLike | None = None,
    plan_only: bool = False,
    verbose: bool = False,
    progress: Progress | None = None,
) -> BuildReport:
    """Compile a Hugging Face MoE checkpoint into a bundle.

    Args:
        model: Folder with config.json and *.safetensors.
        output: Folder of the bundle; an older bundle there is replaced once the new one is complete.
        context: Tokens a slot can hold; None = min(4096, what the model allows).
        batch: Slots.
        kv: Cache format: mkv2 | mkv2_lean | k4v2 | int8 | fp16 | fp32 (hyphens do too), or auto: mkv2, and
            more bits for the layers that need them to stay within `kv_budget`.
        kv_budget: For auto: largest mean KL of the model's predictions from those over an exact cache, in
            nats, on calibration text that the fit did not see; None = 0.05.
        weights: Dense weights: int4 (embeddings and head int8) | bf16.
        experts: Routed experts: int4 | bf16.
        calibration: Text files for the cache's calibration; None = the shipped text.
        target: auto | cpu | sm_80,sm_86,...: GPU engines beside the CPU graph. auto = all that TensorRT-RTX
            builds for; no GPU is needed.
        dtype: Activations of the engines: fp16 | bf16.
        dump_dir: Write exported.onnx (with fp32 weights) and the graph after each pass there.
        plan_only: Neither need nor read weights: `model` may hold nothing but config.json. The bundle has
            graph, engines and the places of all weights, and is marked as a plan.
        verbose: Also report passes that changed nothing.
        progress: Where progress is shown; None shows nothing.

    Returns:
        What was done; the bundle holds the same as `build_report.json`.

    Raises:
        MoecError: bad input, a model that moec cannot compile, or a full disk. Nothing is left behind then,
            and an older bundle at `output` is untouched; the same holds for KeyboardInterrupt.
    """
    for what, path in (("model", model), ("output", output)):
        if not os.fspath(path):  # an unset variable; Path("") would be the current folder
            raise MoecError(f"The path of the {what} is empty")
    texts = [calibration] if isinstance(calibration, (str, os.PathLike)) else calibration or []
    options = BuildOptions(
        Path(model), Path(output), context, batch, kv.replace("-", "_"), weights, experts,
        tuple(Path(t) for t in texts), None if dump_dir is None else Path(dump_dir), target, dtype,
        kv_budget, plan_only,
    )  # fmt: skip
    check_options(options)
    progress = progress or Progress()
    targets = choose_targets(options, progress)
    with progress.phase("Reading the checkpoint") as task:
        checkpoint = open_checkpoint(options.model, weights=not plan_only)
        options = replace(options, context=check_context(checkpoint, context))
        if not plan_only:
            check_disk(checkpoint, options)
        task.note(f"{checkpoint.config.model_type}, context {options.context}, {batch} slots")
    with BundleWriter(options.output) as writer:
        return _Build(options, checkpoint, writer, progress, verbose, targets).run()


class _Build:
    """One build: every method is a stage and leaves its files in the writer's folder."""

    def __init__(
        self,
        options: BuildOptions,
        checkpoint: Checkpoint,
        writer: BundleWriter,
        progress: Progress,
        verbose: bool,
        targets: Targets,
    ) -> None:
        self.options, self.checkpoint, self.writer = options, checkpoint, writer
        self.progress, self.verbose, self.targets = progress, verbose, targets
        self.engines: list[Engine] = []
        self.calibration: Mapping[str, np.ndarray] | None = None
        self.inputs = InputPower() if self._weighs_inputs() else None
        self.report = BuildReport(writer.path, options.to_json())

    def _weighs_inputs(self) -> bool:
        """Whether int4 is to know what it is multiplied with; without a tokenizer no text can be run."""
        quantized = "int4" in (self.options.weights, self.options.experts)
        return quantized and bool(self.checkpoint.tokenizer_files())

    def run(self) -> BuildReport:
        captured = self.capture()
        geometry, layouts = captured.geometry, self.cache_layouts(captured.geometry)
        rewritten = self.rewrite(captured, layouts)
        places, header = self.weights(captured, layouts)
        self.engines = engine_stage(rewritten, self.writer.folder, self.targets, self.options, self.progress)
        self.report.engines = [engine.to_report() for engine in self.engines]
        if self.options.plan_only:
            remove_plan(self.writer.folder)
        with self.progress.phase("Writing the bundle"):
            bind_weights(captured.model, places)
            write_bytes(self.writer.folder / GRAPH, _serialize(captured.model))
            facts = copy_model_files(self.checkpoint, self.writer.folder)
            if not facts.has_tokenizer:
                self.progress.warn("the checkpoint has no tokenizer: the bundle takes token ids only")
            self.measure(geometry, layouts, places)
            manifest = self.manifest(captured, layouts, facts)
            self.finish(manifest, header)
        self.progress.table(size_table(self.report.sizes, self.report.options))
        return self.report

    def weights(
        self, captured: Captured, layouts: Mapping[int, KVLayout]
    ) -> tuple[dict[str, tuple[int, int]], StoreHeader]:
        """Everything that is read off the weights: calibration and both packed files, or only their plan."""
        plans = plans_for(captured.model, self.checkpoint.shape)
        if self.options.plan_only:
            write_calibration(self.writer.folder, neutral(layouts), self.options, False)
            return write_plan(self.writer.folder, plans, self.checkpoint, captured.geometry, self.options)
        self.calibrate(captured.geometry, layouts)
        self.check_exact_size(plans, captured.geometry)
        return self.pack_dense(plans), self.pack_experts(captured.geometry)

    def capture(self) -> Captured:
        """Export the model; with --dump-dir also as a file that stock ONNX Runtime runs."""
        with self.progress.phase("Exporting the graph") as task:
            captured = capture(self.checkpoint, self.options.batch, self.options.context)
            task.note(f"{captured.model.graph.num_nodes()} nodes")
            if self.options.dump_dir is not None and not self.options.plan_only:
                self.options.dump_dir.mkdir(parents=True, exist_ok=True)
                save_exported(captured, self.checkpoint, self.options.dump_dir / "exported.onnx")
        for warning in caveats(self.checkpoint.config, captured.geometry):
            self.progress.warn(warning)
        return captured

    def cache_layouts(self, geometry: Geometry) -> dict[int, KVLayout]:
        """The cache layout of every attention layer; with --kv auto the model runs for it."""
        if self.options.kv != AUTO:
            return layouts_of(geometry, self.options)
        choice = choose_layouts(self.checkpoint, geometry, self.options, self.progress, self.inputs)
        self.report.cache = choice_report(choice, self.options.kv_budget)
        self.calibration = choice.tensors
        return choice.layouts

    def rewrite(self, captured: Captured, layouts: Mapping[int, KVLayout]) -> ir.Model:
        """Run the passes; the model becomes the CPU graph. Returns the graph in the moec dialect."""
        context = pipeline.RewriteContext(
            captured.geometry, dict(layouts), self.options.weights, self.options.experts, self._compute()
        )
        with self.progress.phase("Rewriting the graph") as task:
            shown = {"on_pass": self._on_pass, "dump_dir": self.options.dump_dir}
            reports = pipeline.run(captured.model, context, passes=pipeline.MOEC_PASSES, **shown)
            rewritten = captured.model.clone()
            reports += pipeline.run(captured.model, context, passes=pipeline.CPU_PASSES, **shown)
            task.note(f"{len(reports)} passes, {captured.model.graph.num_nodes()} nodes")
        self.report.passes = [_plain(r) for r in reports]
        return rewritten

    def _compute(self) -> str:
        """Activations in the experts' products: bf16 experts are the exact mode."""
        return "int8" if self.options.experts == "int4" else "fp32"

    def _on_pass(self, report: Any) -> None:
        if report.applied or self.verbose:
            notes = f"  {'; '.join(map(str, report.notes))}" if report.notes and self.verbose else ""
            self.progress.info(
                f"  {report.name:<26} {report.seconds:7.1f} s  {report.applied} applied{notes}"
            )

    def calibrate(self, geometry: Geometry, layouts: Mapping[int, KVLayout]) -> None:
        """Fit the cache's static tensors, unless that is done, and write calibration.safetensors."""
        if self.calibration is None:
            self.calibration, errors = calibrate_stage(
                self.checkpoint, geometry, layouts, self.options, self.progress, self.inputs
            )
            layers = [{"layer": i, "format": layouts[i].format, "error": e} for i, e in errors.items()]
            self.report.cache = {"layers": layers}
        quantized = any(layout.quantized for layout in layouts.values())
        used = self.options.kv == AUTO or quantized or self.inputs is not None
        write_calibration(self.writer.folder, self.calibration, self.options, used)

    @cached_property
    def importance(self) -> dict[str, np.ndarray]:
        """Of the input columns of weights, as calibration saw them."""
        return self.inputs.importance() if self.inputs is not None else {}

    def check_exact_size(self, plans: Sequence[TensorPlan], geometry: Geometry) -> None:
        """The last moment to refuse a disk that is too small."""
        dense = plan_weights(plans, self.checkpoint.shape).total_bytes
        needed = dense + plan_store(geometry, self.options.experts).file_bytes
        check_free_space(self.writer.folder, needed)

    def pack_dense(self, plans: Sequence[TensorPlan]) -> dict[str, tuple[int, int]]:
        """Write weights.safetensors."""
        total = plan_weights(plans, self.checkpoint.shape).total_bytes
        with self.progress.phase("Packing dense weights", total=total) as task:
            path = self.writer.folder / WEIGHTS
            places = write_weights(path, plans, self.checkpoint, task.advance, self.importance)
            task.note(f"{len(plans)} tensors, {total / 1e6:.1f} MB, {self.options.weights}")
        return places

    def pack_experts(self, geometry: Geometry) -> StoreHeader:
        """Write experts.moex."""
        total = store_bytes(geometry, self.options.experts)
        with self.progress.phase("Packing experts", total=total) as task:
            path = self.writer.folder / EXPERTS
            header = write_experts(
                path, geometry, self.checkpoint, self.options.experts, task.advance, self.importance
            )
            task.note(f"{header.num_experts} experts, {total / 1e6:.1f} MB, {self.options.experts}")
        return header

    def measure(
        self,
        geometry: Geometry,
        layouts: Mapping[int, KVLayout],
        places: Mapping[str, tuple[int, int]],
    ) -> None:
        """Fill in the sizes of the report."""
        sizes = dict.fromkeys(("vocabulary", "dense", "vocabulary_bf16", "dense_bf16"), 0)
        for name in {_parameter(tensor) for tensor in places}:
            shape = self.checkpoint.shape(name)
            part = "vocabulary" if len(shape) == 2 and shape[0] == geometry.vocab_size else "dense"
            sizes[part] += sum(places[n][1] for n in (name, f"{name}.codes", f"{name}.scales") if n in places)
            sizes[f"{part}_bf16"] += 2 * math.prod(shape)
        files = [path for path in self.writer.folder.rglob("*") if path.is_file() and path.name != EXPERTS]
        total = sum(path.stat().st_size for path in files) + self.planned_bytes(places)
        sizes["experts"] = store_bytes(geometry, self.options.experts)
        sizes["experts_bf16"] = 2 * expert_elements(geometry)
        sizes["engine"] = sum(engine.report.plan_bytes for engine in self.engines)
        sizes["other"] = total - sizes["dense"] - sizes["vocabulary"] - sizes["engine"]
        sizes["total"] = total + sizes["experts"]
        sizes["total_bf16"] = sizes["dense_bf16"] + sizes["vocabulary_bf16"] + sizes["experts_bf16"]
        self.report.sizes = sizes | cache_sizes(layouts)

    def planned_bytes(self, places: Mapping[str, tuple[int, int]]) -> int:
        """Bytes of the dense weights that a plan leaves out."""
        return sum(length for _, length in places.values()) if self.options.plan_only else 0

    def manifest(
        self, captured: Captured, layouts: Mapping[int, KVLayout], facts: TokenizerFacts
    ) -> Manifest:
        """The manifest, complete but for the files."""
        inputs, outputs = bindings_of(captured.model.graph)
        return Manifest(
            model=identity(self.checkpoint),
            geometry=captured.geometry,
            context=self.options.context,
            batch=self.options.batch,
            kv=dict(layouts),
            weights_format=self.options.weights,
            experts_format=self.options.experts,
            group_size=GROUP_SIZE,
            inputs=inputs,
            outputs=outputs,
            tokenizer=facts,
            moec_version=__version__,
            generation=generation_defaults(self.checkpoint),
            sizes=self.report.sizes,
            options=self.options.to_json(),
            engines=[engine.to_manifest() for engine in self.engines],
            plan=self.options.plan_only,
        )

    def finish(self, manifest: Manifest, header: StoreHeader) -> None:
        """Write the report, checksum everything and move the bundle to its place."""
        self.report.seconds, self.report.warnings = self.progress.seconds, self.progress.warnings
        text = json.dumps(self.report.to_json(), indent=1) + "\n"
        write_bytes(self.writer.folder / REPORT, text.encode())
        checked = {} if self.options.plan_only else {EXPERTS: checked_bytes(header)}
        self.writer.finish(manifest, checked, unlisted=[REPORT])


def _serialize(model: ir.Model) -> bytes:
    return ir.to_proto(model).SerializeToString(deterministic=True)


def _parameter(tensor: str) -> str:
    return tensor.removesuffix(".codes").removesuffix(".scales")


def _plain(report: Any) -> dict[str, Any]:
    return json.loads(json.dumps(asdict(report), default=str))
