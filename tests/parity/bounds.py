"""The bounds of exactness against transformers, and the reference run that they are about."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache

PROMPT, STEPS = 256, 64
MEDIAN, PERCENTILE_99 = 2e-4, 1e-2
MEAN_KL_FP16, TOP1_FP16 = 2e-3, 0.97


def load_reference(checkpoint: Path) -> torch.nn.Module:
    """transformers with the checkpoint's bf16 weights in float32, attention and experts "eager"."""
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", experts_implementation="eager"
    )
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def reference_logits(
    model: torch.nn.Module, tokens: list[int], prompt: int = PROMPT, cache_class: type = DynamicCache
) -> np.ndarray:
    """Teacher-forced: `prompt` tokens in one pass, the rest one by one over the cache; float32 [S,V]."""
    cache = cache_class(config=model.config)
    chunks = [tokens[:prompt], *([token] for token in tokens[prompt:])]
    parts = [model(torch.tensor([chunk]), cache=cache).logits[0] for chunk in chunks]
    return torch.cat(parts).numpy()


def assert_exact(reference: np.ndarray, candidate: np.ndarray) -> None:
    """Bounds for a run in float32: logits [S,V] of both.

    A router tie may flip an expert at single positions, hence a median and a percentile; transformers differs
    from itself by up to 0.18 between one pass and step by step.
    """
    assert candidate.shape == reference.shape
    difference = np.abs(candidate.astype(np.float64) - reference).max(-1)
    median, high = np.median(difference), np.percentile(difference, 99)
    print(f"|logit difference|: median {median:.2e}, 99th percentile {high:.2e}, max {difference.max():.2e}")
    assert median <= MEDIAN
    assert high <= PERCENTILE_99
    best = np.sort(reference, -1)
    clear = best[:, -1] - best[:, -2] > 2 * difference
    assert clear.any()
    assert np.array_equal(candidate.argmax(-1)[clear], reference.argmax(-1)[clear])


def assert_close(reference: np.ndarray, candidate: np.ndarray) -> None:
    """Bounds for an fp16 cache: mean KL(reference || candidate) and agreement of the likeliest token."""
    expected, got = (torch.log_softmax(torch.from_numpy(x).double(), -1) for x in (reference, candidate))
    divergence = (expected.exp() * (expected - got)).sum(-1).mean().item()
    agreement = (expected.argmax(-1) == got.argmax(-1)).double().mean().item()
    print(f"mean KL {divergence:.2e}, top-1 agreement {100 * agreement:.2f} %")
    assert divergence <= MEAN_KL_FP16
    assert agreement >= TOP1_FP16
