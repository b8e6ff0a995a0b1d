"""The arguments of a build, checked before anything slow happens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from moec.bundle.writer import check_free_space, check_target
from moec.calibrate.budget import DEFAULT_BUDGET
from moec.calibrate.text import read_text
from moec.checkpoint import Checkpoint
from moec.errors import MoecError
from moec.reference.experts import WEIGHT_FORMATS
from moec.reference.kv_layout import FORMATS, QUANTIZED_FORMATS

DEFAULT_CONTEXT = 4096
MAX_BATCH = 4096
AUTO = "auto"
GPU_DTYPES = ("fp16", "bf16")
_BITS = {"int4": 4.25, "int8": 8.25, "bf16": 16.0}


@dataclass(frozen=True)
class BuildOptions:
    """What `build` was asked for; see there. `context` None means the default for the model."""

    model: Path
    output: Path
    context: int | None
    batch: int
    kv: str
    weights: str
    experts: str
    calibration: tuple[Path, ...]
    dump_dir: Path | None
    target: str = "auto"
    dtype: str = "fp16"
    budget: float | None = None
    plan_only: bool = False

    @property
    def kv_budget(self) -> float:
        """Largest mean KL that `--kv auto` may cost, in nats."""
        return DEFAULT_BUDGET if self.budget is None else self.budget

    def to_json(self) -> dict[str, Any]:
        """For the manifest: choices by value, files by name only (a bundle holds no machine's paths)."""
        names = [path.name for path in self.calibration]
        fields = ("context", "batch", "kv", "weights", "experts", "target", "dtype")
        chosen = {name: getattr(self, name) for name in fields} | {"calibration": names}
        return chosen | ({"kv_budget": self.kv_budget} if self.kv == AUTO else {})


def check_options(options: BuildOptions) -> None:
    """Everything that can be refused without looking at the model.

    Raises:
        MoecError: unknown formats, sizes below 1, output paths that would destroy something, no text.
    """
    _choice("--kv", options.kv, (*FORMATS, AUTO))
    _check_budget(options)
    if options.plan_only and options.kv == AUTO:
        raise MoecError("--kv auto runs the model, but --plan-only has no weights", hint="Choose a format.")
    _choice("--weights", options.weights, WEIGHT_FORMATS)
    _choice("--experts", options.experts, WEIGHT_FORMATS)
    _choice("--dtype", options.dtype, GPU_DTYPES)
    if options.context is not None:
        _at_least_one("context", options.context)
    _at_least_one("batch", options.batch)
    if options.batch > MAX_BATCH:
        raise MoecError(f"batch {options.batch} is more than the {MAX_BATCH} slots a bundle can have")
    _check_paths(options)
    uses_text = options.kv in (*QUANTIZED_FORMATS, AUTO) or "int4" in (options.weights, options.experts)
    if options.calibration and uses_text:
        read_text(options.calibration)


def check_context(checkpoint: Checkpoint, wanted: int | None) -> int:
    """The context in tokens: what is wanted, or min(4096, what the model allows).

    Raises:
        MoecError: more than the model allows.
    """
    config = checkpoint.config.get_text_config()
    limit = int(getattr(config, "max_position_embeddings", None) or DEFAULT_CONTEXT)
    if wanted is not None and wanted > limit:
        what = f"context {wanted} is longer than the model's {limit} (max_position_embeddings)"
        raise MoecError(what, where=str(checkpoint.path), hint=f"Choose --context {limit} or less.")
    return min(DEFAULT_CONTEXT, limit) if wanted is None else wanted


def check_disk(checkpoint: Checkpoint, options: BuildOptions) -> None:
    """Refuse early when the bundle cannot fit, estimated from the shapes of the parameters.

    Raises:
        MoecError: too little space.
    """
    check_free_space(options.output, estimated_bytes(checkpoint, options))


def estimated_bytes(checkpoint: Checkpoint, options: BuildOptions) -> int:
    """About how many bytes the bundle will have, 16 MiB for graph and tokenizer included."""
    bits, vocabulary = 0.0, checkpoint.config.get_text_config().vocab_size
    for name in {checkpoint.canonical(n) for n in checkpoint.param_names()}:
        shape, count = checkpoint.shape(name), 1
        for dim in shape:
            count *= dim
        kind = options.experts if len(shape) == 3 else options.weights
        if len(shape) == 2 and shape[0] == vocabulary and kind == "int4":
            kind = "int8"
        bits += count * (_BITS[kind] if len(shape) > 1 else 32)
    return int(bits / 8) + (16 << 20)


def _choice(name: str, value: str, known: Sequence[str]) -> None:
    if value not in known:
        raise MoecError(f"{name} {value} is unknown", hint=f"Choose one of {', '.join(known)}.")


def _check_budget(options: BuildOptions) -> None:
    if options.budget is None:
        return
    if options.kv != AUTO:
        raise MoecError(f"--kv-budget is for --kv auto, not {options.kv}")
    if not options.budget >= 0:
        raise MoecError(f"--kv-budget is {options.budget}, but a divergence is not negative")


def _at_least_one(name: str, value: int) -> None:
    if value < 1:
        raise MoecError(f"{name} is {value}, but must be at least 1")


def _check_paths(options: BuildOptions) -> None:
    model, output = options.model.resolve(), options.output.resolve()
    if model.is_dir() and (output == model or model in output.parents or output in model.parents):
        what = "The output folder and the model's folder must not contain each other"
        raise MoecError(what, where=str(options.output), hint="Choose another output path.")
    check_target(options.output)
    if options.dump_dir is None:
        return
    dump = options.dump_dir.resolve()
    if dump == output or output in dump.parents:
        raise MoecError("The dump folder is inside the output folder", where=str(options.dump_dir))
    if dump.exists() and not dump.is_dir():
        raise MoecError("The dump path is not a folder", where=str(options.dump_dir))
