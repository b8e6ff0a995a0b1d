"""What quantization costs: perplexity, divergence and agreement on held-out text, and a long sample.

    python -m benchmarks.quality [--checkpoint DIR] [--tokens 4096]

Shakespeare's plays, which neither the calibration nor the router training saw, in texts of 1024 tokens. The
yardstick is transformers in float32 with the checkpoint's own weights.
"""

from __future__ import annotations

import argparse
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
from tokenizers import Tokenizer

import moec
from benchmarks import hf
from benchmarks.distributions import Comparison
from benchmarks.report import REPO, save, show
from moec.runtime.session import Session
from tests.helpers.text import PLAYS, held_out_tokens

VARIANTS = {
    "kv fp32, weights bf16, experts bf16": {"kv": "fp32", "weights": "bf16", "experts": "bf16"},
    "kv mkv2, weights bf16, experts bf16": {"kv": "mkv2", "weights": "bf16", "experts": "bf16"},
    "kv fp32, weights int4, experts int4": {"kv": "fp32", "weights": "int4", "experts": "int4"},
    "defaults: kv mkv2, weights int4, experts int4": {},
}
TEXT_TOKENS = 1024
PROMPT = "Write a long story about a clockmaker who repairs the clock of a town where nobody is ever on time."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--checkpoint", type=Path, default=REPO / "samples" / "smolmoe" / "checkpoint")
    parser.add_argument("--tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only-defaults", action="store_true", help="leave out the other variants")
    options = parser.parse_args()
    texts = held_out(options.checkpoint, options.tokens)
    model = hf.load_reference(options.checkpoint, options.threads)
    reference = [hf.score(model, text) for text in texts]
    del model
    rows = [_row("transformers fp32", _compare(texts, reference, reference))]
    for name, settings in list(VARIANTS.items())[-1 if options.only_defaults else 0 :]:
        session = _session(options.checkpoint, settings, options.threads)
        rows.append(_row(name, _compare(texts, reference, (session.score(text) for text in texts))))
    show(f"{sum(map(len, texts))} held-out tokens", rows)
    sample, repeated = write_sample(session)
    save("quality", {"tokens": sum(map(len, texts)), "rows": rows, "sample": sample, "repeated": repeated})


def held_out(checkpoint: Path, count: int) -> list[list[int]]:
    """Texts of at most 1024 tokens from different plays, `count` tokens in all."""
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    sizes = [min(TEXT_TOKENS, count - start) for start in range(0, count, TEXT_TOKENS)]
    return [held_out_tokens(tokenizer, size, name) for size, name in zip(sizes, PLAYS, strict=False)]


def _session(checkpoint: Path, settings: dict[str, str], threads: int) -> Session:
    bundle = REPO / "build" / "benchmarks" / ("-".join(settings.values()) or "defaults")
    shutil.rmtree(bundle, ignore_errors=True)  # an older moec may have made it
    bundle.parent.mkdir(parents=True, exist_ok=True)
    moec.build(checkpoint, bundle, **settings)
    return moec.load(bundle, "cpu", threads=threads)


def _compare(texts: list[list[int]], reference: list[np.ndarray], logits: Iterable[np.ndarray]) -> Comparison:
    result = Comparison()
    for text, expected, got in zip(texts, reference, logits, strict=True):
        result.add(np.asarray(text), expected, got)
    return result


def _row(name: str, result: Comparison) -> dict[str, object]:
    return {
        "": name,
        "perplexity": round(result.perplexity, 3),
        "mean KL": round(result.divergence, 5),
        "top-1 agreement": f"{100 * result.top1:.2f} %",
    }


def write_sample(session: Session, count: int = 300) -> tuple[str, float]:
    """`count` tokens with the model's own sampling settings, and how much of them repeats."""
    generation = session.generate(PROMPT, max_tokens=count, ignore_eos=True)
    text = generation.read()
    repeated = repeated_share(generation.tokens)
    print(f"\n{count} tokens by the defaults, {100 * repeated:.0f} % of the 4-grams repeated:\n\n{text}\n")
    return text, repeated


def repeated_share(tokens: list[int], length: int = 4) -> float:
    """Share of n-grams that stood in the text before: near 1 where the model loops."""
    grams = [tuple(tokens[i : i + length]) for i in range(len(tokens) - length + 1)]
    return 1 - len(set(grams)) / max(1, len(grams))


if __name__ == "__main__":
    main()
