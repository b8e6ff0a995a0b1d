"""Let the dense model write moec/calibrate/default.txt: `python -m samples.smolmoe.write_text`.

The text calibrates KV caches and trains the sample's routers; being the model's own, it overlaps with no
evaluation text. The seed is fixed: the same machine, thread count and torch give the same text.
It takes about 4 minutes on 2 cores.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Iterator
from pathlib import Path

import torch
from transformers import LlamaForCausalLM

from samples.smolmoe.dense import load_model
from samples.smolmoe.source import build_tokenizer, load_dense

HERE = Path(__file__).parent
OUTPUT = HERE.parents[1] / "moec" / "calibrate" / "default.txt"
BATCH, MAX_TOKENS, SEED = 52, 360, 20240607
SAMPLING = {"temperature": 0.8, "top_p": 0.95, "top_k": 0}
MIN_CHARACTERS, MIN_DENSITY, MAX_BYTES = 400, 0.36, 102_400
PLAIN_MARKS = dict(zip(map(ord, "\u2018\u2019\u201c\u201d\u2013\u2014\u2026"), "''\"\"--.", strict=True))
PROMPT = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=OUTPUT)
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    options.output.write_text(compose(answers(), MAX_BYTES), encoding="ascii")


def answers() -> Iterator[str]:
    """The model's answers to prompts.txt, in order."""
    dense = load_dense()
    tokenizer, model = build_tokenizer(dense), load_model(dense)
    prompts = (HERE / "prompts.txt").read_text().splitlines()
    for first in range(0, len(prompts), BATCH):
        encoded = [tokenizer.encode(PROMPT.format(p)).ids for p in prompts[first : first + BATCH]]
        for ids in generate(model, encoded):
            yield tokenizer.decode(ids)
        print(f"{min(first + BATCH, len(prompts))} of {len(prompts)} prompts answered", flush=True)


@torch.inference_mode()
def generate(model: LlamaForCausalLM, prompts: list[list[int]]) -> list[list[int]]:
    """Sample a continuation of every prompt in one batch (padded on the left)."""
    pad, width = model.config.pad_token_id, max(map(len, prompts))
    ids = torch.tensor([[pad] * (width - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p in prompts])
    out = model.generate(ids, attention_mask=mask, max_new_tokens=MAX_TOKENS, do_sample=True, **SAMPLING)
    return out[:, width:].tolist()


def compose(texts: Iterator[str], max_bytes: int) -> str:
    """Clean answers, one blank line apart, whole ones only, up to `max_bytes`."""
    kept, size = [], 0
    for text in map(clean, texts):
        if is_useful(text) and size + len(text) + 2 <= max_bytes:
            kept.append(text)
            size += len(text) + 2
    return "\n\n".join(kept) + "\n"


def clean(text: str) -> str:
    """Plain ASCII, no trailing blanks, cut after the last finished sentence or line."""
    plain = text.translate(PLAIN_MARKS).encode("ascii", "ignore").decode()
    plain = "\n".join(line.rstrip() for line in plain.strip().splitlines())
    end = max(plain.rfind(mark) for mark in (". ", ".\n", "!\n", "?\n", '"\n', "\n\n", ";\n", "}\n"))
    finished = plain if plain.endswith((".", "!", "?", '"', "`", "}", ")")) else plain[: end + 1]
    return finished.strip()


def is_useful(text: str) -> bool:
    """Long enough and not a loop: a looping text compresses far better than prose."""
    density = len(zlib.compress(text.encode(), 9)) / max(1, len(text))
    return len(text) >= MIN_CHARACTERS and density >= MIN_DENSITY


if __name__ == "__main__":
    main()
