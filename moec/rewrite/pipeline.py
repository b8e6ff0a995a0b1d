"""The visible list of passes from `exported.onnx` to the graph that a backend runs."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import onnx_ir as ir
import onnx_ir.passes.common as common

from moec.dialect import schemas
from moec.rewrite import (
    attention,
    dense,
    embedding,
    experts,
    fuse,
    independent,
    layout,
    rank,
    rotary,
    router,
    stored,
    widen,
)
from moec.rewrite.context import RewriteContext
from moec.rewrite.golden import graph_text

OPSET = 1


@dataclass(frozen=True)
class Pass:
    """One pass: `apply(model, context, notes)` edits the graph in place and returns how often it applied."""

    name: str
    apply: Callable[[ir.Model, RewriteContext, list[str]], int]


@dataclass
class PassReport:
    """What a pass did: times applied, seconds, and sentences on what did not apply and why."""

    name: str
    applied: int
    seconds: float
    notes: list[str] = field(default_factory=list)


WIDEN = Pass("widen", widen.widen)
"""Before all others where the captured graph is in fp16 or bf16."""

MOEC_PASSES = (
    Pass("attention", attention.lower_attention),  # -> moec::AsymKVAttention
    Pass("experts", experts.lower_experts),  # -> moec::Experts
    Pass("router", router.lower_router),  # -> moec::PipelinedMoE
    Pass("layout", layout.lower_layout),  # heads by token, without transposes
)
"""Standard graph -> rewritten.onnx: dense layers are still standard operators on parameters."""

CPU_PASSES = (
    Pass("embedding", embedding.lower_embedding),  # -> GatherBlockQuantized
    Pass("dense", dense.lower_dense),  # -> moec::FusedLinear
    Pass("rank", rank.lower_rank),  # fewer reshapes
    Pass("rotary", rotary.lower_rotary),  # -> moec::RotaryPair
    Pass("fuse", fuse.lower_fused),  # fewer nodes
    Pass("stored", stored.lower_stored),  # the rest: fp32 as stored
    Pass("independent", independent.mark_independent),  # no padding of runs
)
"""rewritten.onnx -> the bundle's CPU graph over the tensors of weights.safetensors."""

PASSES = MOEC_PASSES + CPU_PASSES


def run(
    model: ir.Model,
    context: RewriteContext,
    on_pass: Callable[[PassReport], None] | None = None,
    dump_dir: str | os.PathLike[str] | None = None,
    passes: tuple[Pass, ...] = PASSES,
) -> list[PassReport]:
    """Applies the passes in place.

    Args:
        model: The captured graph, or one that earlier passes made.
        context: What to build.
        on_pass: Called after every pass.
        dump_dir: Folder that gets the graph as .onnx and .txt before and after each pass.
        passes: Which ones; `MOEC_PASSES` stops at the moec dialect.

    Raises:
        MoecError: An attention or experts layer cannot be rewritten.
    """
    reports = []
    if widen.half_type(model.graph) is not None and passes[:1] == MOEC_PASSES[:1]:
        passes = (WIDEN, *passes)
    if dump_dir is not None:
        dump(model, dump_dir, f"{_first_number(passes):02d}-before")
    for number, step in enumerate(passes, _first_number(passes) + 1):
        reports.append(_apply(step, model, context))
        if dump_dir is not None:
            dump(model, dump_dir, f"{number:02d}-{step.name}")
        if on_pass is not None:
            on_pass(reports[-1])
    return reports


def _first_number(passes: tuple[Pass, ...]) -> int:
    return PASSES.index(passes[0]) if passes and passes[0] in PASSES else 0


def _apply(step: Pass, model: ir.Model, context: RewriteContext) -> PassReport:
    start, notes = time.perf_counter(), []
    applied = step.apply(model, context, notes)
    model.graph.opset_imports["moec"] = OPSET
    clean(model)
    infer(model)
    return PassReport(step.name, applied, time.perf_counter() - start, list(dict.fromkeys(notes)))


def clean(model: ir.Model) -> None:
    """Drops dead nodes, unused parameters and copies; sorts."""
    common.IdentityEliminationPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.TopologicalSortPass()(model)


def infer(model: ir.Model) -> None:
    """Types and shapes of the values that rules made."""
    schemas.register()
    with placeholders(model):
        common.ShapeInferencePass()(model)


def dump(model: ir.Model, folder: str | os.PathLike[str], name: str) -> None:
    """Writes `name`.onnx (the graph only: its weights are not there) and `name`.txt."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    with placeholders(model):
        (folder / f"{name}.onnx").write_bytes(ir.to_proto(model).SerializeToString())
    (folder / f"{name}.txt").write_text(graph_text(model), encoding="utf-8")


@contextmanager
def placeholders(model: ir.Model, location: str = "weights.safetensors") -> Iterator[None]:
    """Makes parameters without data external tensors for a while, so the graph can be serialised."""
    empty = [v for v in model.graph.initializers.values() if v.const_value is None]
    for v in empty:
        v.const_value = ir.ExternalTensor(location, 0, None, v.dtype, shape=v.shape, name=v.name)
    try:
        yield
    finally:
        for v in empty:
            v.const_value = None
