"""`moec build`: compile a checkpoint into a bundle."""

from __future__ import annotations

import shlex
import signal
import sys
import types
from collections.abc import Iterator
from contextlib import contextmanager

import click

_EXAMPLES = """\b
Examples:
  moec build ./checkpoint -o ./bundle
  moec build ./checkpoint -o ./bundle --context 8192 --batch 1
  moec build ./checkpoint -o ./bundle --target sm_89,sm_120 --dtype bf16
  moec build ./checkpoint -o ./bundle --kv fp16 --weights bf16 --experts bf16
  moec build ./only-config -o ./plan --plan-only
  moec build ./model-Q8_0.gguf -o ./bundle
  moec build ./checkpoint -o ./bundle --calibration my-text.txt --dump-dir ./graphs -v

\b
Cache formats (bits per cached number at 4096 tokens, head_dim 128):
  mkv2       2.98  2 bits, a quarter of the K channels 4 bits; first 16 and last 64-128 tokens fp16
  mkv2-lean  2.86  the same with an eighth of the K channels
  k4v2       3.71  all K channels 4 bits
  int8       8.43  all 8 bits
  fp16, fp32       as they are
  auto             mkv2, and more for layers that need it to stay within --kv-budget
"""


@click.command(
    epilog=_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.argument("model", type=click.Path(), metavar="MODEL")
@click.option("-o", "--output", required=True, type=click.Path(), metavar="BUNDLE", help="Folder to make.")
@click.option("--context", type=int, help="Tokens a slot can hold.  [default: min(4096, the model's)]")
@click.option("--batch", type=int, default=4, show_default=True, help="Slots: requests served at a time.")
@click.option(
    "--kv",
    default="mkv2",
    show_default=True,
    metavar="FORMAT",
    help="Cache: mkv2, mkv2-lean, k4v2, int8, fp16, fp32, auto.",
)
@click.option(
    "--kv-budget",
    type=float,
    metavar="X",
    help="For --kv auto: most mean KL in nats that the cache may cost on calibration text.  [default: 0.05]",
)
@click.option("--weights", default="int4", show_default=True, help="Dense weights: int4, bf16.")
@click.option("--experts", default="int4", show_default=True, help="Routed experts: int4, bf16.")
@click.option(
    "--calibration",
    multiple=True,
    type=click.Path(),
    metavar="FILE",
    help="Text to calibrate the cache with; may be repeated.  [default: text shipped with moec]",
)
@click.option(
    "--target",
    default="auto",
    show_default=True,
    metavar="TARGETS",
    help="auto, cpu, or GPUs: sm_80,sm_86,sm_89,sm_120. A CPU graph is always built.",
)
@click.option("--dtype", default="fp16", show_default=True, help="GPU activations: fp16, bf16.")
@click.option(
    "--dump-dir", type=click.Path(), metavar="DIR", help="Write exported.onnx (fp32 weights) and each pass."
)
@click.option(
    "--plan-only",
    is_flag=True,
    help="Graph, engine and manifest without weights: MODEL needs nothing but config.json.",
)
@click.option("-v", "--verbose", is_flag=True, help="Show all passes with their notes.")
def build(
    model: str,
    output: str,
    context: int | None,
    batch: int,
    kv: str,
    kv_budget: float | None,
    weights: str,
    experts: str,
    calibration: tuple[str, ...],
    target: str,
    dtype: str,
    dump_dir: str | None,
    plan_only: bool,
    verbose: bool,
) -> None:
    """Compile MODEL into a bundle: a folder with a Hugging Face MoE checkpoint, or a .gguf file.

    The bundle is complete: graph, packed weights, calibration, tokenizer. Copy the folder anywhere and run it
    with `moec run`. A build that fails or is interrupted leaves nothing behind; an older bundle at the same
    path is replaced only when the new one is complete.
    """
    from rich.console import Console

    from moec.builder import build as build_bundle
    from moec.progress import ConsoleProgress

    progress = ConsoleProgress(Console(file=sys.stdout, highlight=False))
    with _terminable():
        build_bundle(
            model, output, context=context, batch=batch, kv=kv, kv_budget=kv_budget, weights=weights,
            experts=experts, calibration=calibration, target=target, dtype=dtype, dump_dir=dump_dir,
            plan_only=plan_only, verbose=verbose, progress=progress,
        )  # fmt: skip
    if plan_only:
        return progress.info(f"{output} is a plan: build it again without --plan-only to add weights")
    progress.info(f'{output} is ready: moec run {shlex.quote(output)} --prompt "..."')


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind like an exit, so that a killed build removes its temporary folder too."""

    def leave(number: int, _: types.FrameType | None) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, leave)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
