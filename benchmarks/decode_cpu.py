"""Time tokens on the CPU: moec's defaults beside transformers fp32, interleaved in one run.

    python -m benchmarks.decode_cpu [--checkpoint DIR] [--bundle DIR] [--threads 2]

Decode: each system decodes greedily after the same prompt; rounds of 8 tokens take turns, so that all see the
same machine. The number is the median of 64 tokens; transformers takes part in the first contexts only, and
`growth` is what one more token of context adds on one thread. Prefill: a prompt of 1024, the median of five.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

from tokenizers import Tokenizer

import moec
from benchmarks import hf
from benchmarks.quality import PLAYS, held_out_tokens
from benchmarks.report import REPO, save, show
from moec.builder.options import DEFAULT_CONTEXT
from moec.runtime.session import Session

CONTEXTS = (16, 1024, 2000, 8000)
COMPARED = 1024  # transformers decodes up to this context
PREFILL, PREFILLS = 1024, 5
TOKENS, ROUND, WARM_UP = 64, 8, 2
STEPS = TOKENS // ROUND * (ROUND + WARM_UP)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=REPO / "samples" / "smolmoe" / "checkpoint")
    parser.add_argument("--bundle", type=Path, help="a bundle of it; made with the defaults where not given")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    options = parser.parse_args()
    bundle = options.bundle or _build(options.checkpoint, max(*options.contexts, PREFILL) + 2 * STEPS)
    one, many = (moec.load(bundle, "cpu", threads=threads) for threads in (1, options.threads))
    model = hf.load_reference(options.checkpoint, options.threads)
    tokenizer = Tokenizer.from_file(str(options.checkpoint / "tokenizer.json"))
    text = held_out_tokens(tokenizer, max(*options.contexts, PREFILL + PREFILLS), PLAYS[0])
    rows = [_measure(one, many, model, text[:context]) for context in options.contexts]
    growth = 1e3 * (rows[-1]["moec, 1 thread"] - rows[0]["moec, 1 thread"]) / (rows[-1]["context"] or 1)
    show(f"ms a token, median of {TOKENS}; others {options.threads} threads", rows)
    print(f"one more token of context, 1 thread: {growth:.2f} us")
    prefill = _prefill(one, many, model, text)
    show(f"seconds for a prompt of {PREFILL}, median of {PREFILLS}", [prefill])
    content = {"threads": options.threads, "tokens": TOKENS, "rows": rows, "growth us": growth}
    save("decode_cpu", content | {"prefill": prefill})


def _build(checkpoint: Path, length: int) -> Path:
    """The defaults, with as long a context as the measurement needs."""
    bundle = REPO / "build" / "benchmarks" / "defaults"
    bundle.parent.mkdir(parents=True, exist_ok=True)
    moec.build(checkpoint, bundle, target="cpu", context=max(DEFAULT_CONTEXT, length))
    return bundle


def _measure(one: Session, many: Session, model, prompt: list[int]) -> dict[str, object]:
    """One thread alone first: two sessions in turn would push each other's weights out of the caches."""
    single = _medians({"moec, 1 thread": _moec_stepper(one, prompt)})
    steppers = {"moec": _moec_stepper(many, prompt)}
    theirs = [f"transformers {experts}" for experts in ("eager", "batched_mm")]
    if len(prompt) <= COMPARED:
        steppers |= {name: _hf_stepper(hf.Decoder(model, prompt, name.split()[1])) for name in theirs}
    medians = _medians(steppers)
    fastest = min((medians[name] for name in theirs if name in medians), default=None)
    ratio = f"{fastest / medians['moec']:.2f}x" if fastest else ""
    return {"context": len(prompt), **single, **dict.fromkeys(theirs, ""), **medians, "faster by": ratio}


def _medians(steppers: dict[str, Callable[[], float]]) -> dict[str, float]:
    """Milliseconds a token, in rounds that take turns."""
    times = {name: [] for name in steppers}
    for _ in range(TOKENS // ROUND):
        for name, step in steppers.items():
            times[name] += [step() for _ in range(WARM_UP + ROUND)][WARM_UP:]
    return {name: 1e3 * statistics.median(values) for name, values in times.items()}


def _moec_stepper(session: Session, prompt: list[int]) -> Callable[[], float]:
    """Seconds a token; one piece of text may hold several tokens, where a character needs several."""
    generation = session.generate(prompt, max_tokens=2 * STEPS, temperature=0, ignore_eos=True)
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


def _prefill(one: Session, many: Session, model, text: list[int]) -> dict[str, float]:
    """Seconds until the first token after a prompt, each system in turn, always a new prompt: a slot whose
    tokens begin like the prompt would keep them."""
    systems = {
        "moec, 1 thread": lambda prompt: next(one.generate(prompt, max_tokens=1, ignore_eos=True)),
        "moec": lambda prompt: next(many.generate(prompt, max_tokens=1, ignore_eos=True)),
        "transformers eager": lambda prompt: hf.Decoder(model, prompt, "eager"),
    }
    times = {name: [] for name in systems}
    for number in range(PREFILLS):
        for name, run in systems.items():
            start = time.perf_counter()
            run(text[number : number + PREFILL])
            times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


if __name__ == "__main__":
    main()
