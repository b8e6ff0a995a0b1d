"""Time a token on the CPU: moec's defaults beside transformers fp32, interleaved in one run.

    python -m benchmarks.decode_cpu [--checkpoint DIR] [--bundle DIR] [--threads 2]

Each system decodes greedily after the same prompt; rounds of 8 tokens take turns, so that all see the same
machine. The number is the median of 64 tokens.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import moec
from benchmarks import hf
from benchmarks.quality import held_out
from benchmarks.report import REPO, save, show
from moec.runtime.session import Session

CONTEXTS = (16, 1024)
TOKENS, ROUND, WARM_UP = 64, 8, 2


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=REPO / "samples" / "smolmoe" / "checkpoint")
    parser.add_argument("--bundle", type=Path, help="a bundle of it; made with the defaults where not given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    options = parser.parse_args()
    bundle = options.bundle or _build(options.checkpoint)
    session = moec.load(bundle, "cpu", threads=options.threads)
    model = hf.load_reference(options.checkpoint, options.threads)
    text = held_out(options.checkpoint, max(options.contexts))[0]
    rows = [_measure(session, model, text[:context]) for context in options.contexts]
    show(f"ms a token, median of {TOKENS}, {options.threads} threads", rows)
    save("decode_cpu", {"threads": options.threads, "tokens": TOKENS, "rows": rows})


def _build(checkpoint: Path) -> Path:
    bundle = REPO / "build" / "benchmarks" / "defaults"
    bundle.parent.mkdir(parents=True, exist_ok=True)
    moec.build(checkpoint, bundle)
    return bundle


def _measure(session: Session, model, prompt: list[int]) -> dict[str, object]:
    steppers = {"moec": _moec_stepper(session, prompt)}
    for experts in ("eager", "batched_mm"):
        steppers[f"transformers {experts}"] = _hf_stepper(hf.Decoder(model, prompt, experts))
    times = {name: [] for name in steppers}
    for _ in range(TOKENS // ROUND):
        for name, step in steppers.items():
            times[name] += [step() for _ in range(WARM_UP + ROUND)][WARM_UP:]
    medians = {name: 1e3 * statistics.median(values) for name, values in times.items()}
    fastest = min(value for name, value in medians.items() if name != "moec")
    return {"context": len(prompt), **medians, "faster by": f"{fastest / medians['moec']:.2f}x"}


def _moec_stepper(session: Session, prompt: list[int]) -> Callable[[], float]:
    """Seconds a token; one piece of text may hold several tokens, where a character needs several."""
    steps = TOKENS // ROUND * (ROUND + WARM_UP)
    generation = session.generate(prompt, max_tokens=2 * steps, temperature=0, ignore_eos=True)
    next(generation)

    def step() -> float:
        before, start = len(generation.tokens), time.perf_counter()
        next(generation)
        return (time.perf_counter() - start) / (len(generation.tokens) - before)

    return step


def _hf_stepper(decoder: hf.Decoder) -> Callable[[], float]:
    def step() -> float:
        decoder.use()
        start = time.perf_counter()
        decoder.step()
        return time.perf_counter() - start

    return step


if __name__ == "__main__":
    main()
