"""The quality numbers against torch's own losses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch.nn.functional import cross_entropy, kl_div

from benchmarks.distributions import Comparison
from benchmarks.quality import repeated_share
from tests.helpers.rng import fresh_rng


def test_comparison_agrees_with_torch_over_two_texts() -> None:
    rng, result = fresh_rng(), Comparison()
    texts = [rng.integers(0, 50, n) for n in (130, 7)]
    pairs = [[rng.normal(0, 3, (len(t), 50)).astype(np.float32) for _ in range(2)] for t in texts]
    for text, (reference, candidate) in zip(texts, pairs, strict=True):
        result.add(text, reference, candidate)
    expected, got = (torch.from_numpy(np.concatenate(x)).double() for x in zip(*pairs, strict=True))
    losses = [
        cross_entropy(torch.from_numpy(c[:-1]).double(), torch.from_numpy(t[1:]), reduction="sum")
        for t, (_, c) in zip(texts, pairs, strict=True)
    ]
    divergence = kl_div(got.log_softmax(-1), expected.log_softmax(-1), log_target=True, reduction="batchmean")
    assert result.perplexity == pytest.approx(torch.exp(sum(losses) / 135).item())
    assert result.divergence == pytest.approx(divergence.item())
    assert result.top1 == (expected.argmax(-1) == got.argmax(-1)).double().mean().item()


def test_same_logits_have_no_divergence() -> None:
    logits = fresh_rng().normal(size=(70, 20)).astype(np.float32)
    result = Comparison()
    result.add(np.arange(70) % 20, logits, logits)
    assert (result.divergence, result.top1) == (0, 1)


def test_repeated_share_tells_a_loop_from_a_text() -> None:
    assert repeated_share(list(range(100))) == 0
    assert repeated_share([1, 2, 3, 4, 5] * 40) > 0.9
