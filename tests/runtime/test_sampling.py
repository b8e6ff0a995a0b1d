"""Sampling against transformers' logits processors and against frequencies."""

import numpy as np
import pytest
import torch
from transformers.generation import logits_process

from moec.errors import MoecError
from moec.runtime.sampling import Sampler, SamplingParams, filtered_distribution
from tests.helpers.rng import fresh_rng

VOCAB = 300


def reference(logits, prompt, params):
    """Probabilities `[V]` by transformers' processors, in the order of `generate`, in float64."""
    scores = torch.tensor(logits, dtype=torch.float64)[None]
    ids = torch.tensor([prompt])
    steps = []
    if params.repetition_penalty != 1.0:
        steps.append(logits_process.RepetitionPenaltyLogitsProcessor(params.repetition_penalty))
    steps.append(logits_process.TemperatureLogitsWarper(params.temperature))
    if params.top_k:
        steps.append(logits_process.TopKLogitsWarper(params.top_k))
    if params.top_p < 1:
        steps.append(logits_process.TopPLogitsWarper(params.top_p))
    if params.min_p:
        steps.append(logits_process.MinPLogitsWarper(params.min_p))
    for step in steps:
        scores = step(ids, scores)
    return scores.softmax(-1)[0].numpy()


@pytest.mark.parametrize("trial", range(30))
def test_distribution_is_transformers(trial, rng):
    params = SamplingParams(
        temperature=float(rng.uniform(0.2, 2)),
        top_k=int(rng.choice([0, 1, 5, 50, VOCAB, VOCAB + 9])),
        top_p=float(rng.choice([1.0, 0.3, 0.9])),
        min_p=float(rng.choice([0.0, 0.05, 0.5])),
        repetition_penalty=float(rng.choice([1.0, 1.3, 0.8])),
    )
    logits = (rng.normal(size=VOCAB) * 3).astype(np.float32)
    prompt = list(rng.integers(0, VOCAB, 20))
    tokens, probabilities = Sampler(params, prompt).distribution(logits)
    dense = np.zeros(VOCAB)
    dense[tokens] = probabilities
    np.testing.assert_allclose(dense, reference(logits, prompt, params), rtol=1e-9, atol=1e-12)


def test_frequencies_follow_the_softmax(rng, seed):
    """20000 draws over 8 tokens: each count within 5 standard deviations of the closed form."""
    logits = rng.normal(size=8).astype(np.float32)
    sampler = Sampler(SamplingParams(temperature=1.5, seed=seed))
    counts = np.bincount([sampler(logits).token for _ in range(20_000)], minlength=8)
    expected = np.exp(logits / 1.5) / np.exp(logits / 1.5).sum()
    sigma = np.sqrt(20_000 * expected * (1 - expected))
    assert (abs(counts - 20_000 * expected) < 5 * sigma).all(), (counts, 20_000 * expected)


def test_a_request_draws_from_its_own_generator(rng, seed):
    """The same seed gives the same tokens, whatever other samplers draw in between."""
    rows = rng.normal(size=(40, VOCAB)).astype(np.float32)
    params = SamplingParams(temperature=1.0, seed=seed)
    alone, mixed, other = (
        Sampler(params),
        Sampler(params),
        Sampler(SamplingParams(temperature=1.0, seed=seed + 1)),
    )
    first = [alone(row).token for row in rows]
    second = [(other(row), mixed(row))[1].token for row in rows]
    assert first == second
    assert first != [Sampler(SamplingParams(temperature=1.0, seed=seed + 1))(row).token for row in rows]


def test_greedy_takes_the_first_of_equals():
    logits = np.zeros(9, np.float32)
    logits[[4, 7]] = 2.5
    assert Sampler(SamplingParams())(logits).token == 4


def test_repetition_penalty_covers_generated_tokens():
    sampler = Sampler(SamplingParams(repetition_penalty=2.0))
    logits = np.array([3.0, 2.0, -1.0], np.float32)
    assert [sampler(logits).token for _ in range(2)] == [0, 1]


def test_logprobs_are_of_the_model(rng):
    logits = rng.normal(size=VOCAB).astype(np.float32)
    choice = Sampler(SamplingParams(temperature=0.1, top_k=1, logprobs=4))(logits)
    expected = torch.tensor(logits, dtype=torch.float64).log_softmax(-1)
    best = expected.topk(4)
    assert [token for token, _ in choice.top_logprobs] == best.indices.tolist()
    np.testing.assert_allclose([p for _, p in choice.top_logprobs], best.values, rtol=1e-12)
    assert choice.logprob == pytest.approx(float(expected[choice.token]))


def test_no_logprobs_unless_asked(rng):
    choice = Sampler(SamplingParams())(rng.normal(size=9).astype(np.float32))
    assert choice.logprob is None
    assert choice.top_logprobs == ()


def test_masked_logits_are_fine_but_nan_is_not():
    logits = np.array([-np.inf, 0.0, -np.inf], np.float32)
    assert Sampler(SamplingParams(temperature=1.0))(logits).token == 1
    logits[0] = np.nan
    with pytest.raises(MoecError, match="not finite"):
        Sampler(SamplingParams())(logits)


@pytest.mark.parametrize(
    "option",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_k": -1},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"min_p": 2.0},
        {"repetition_penalty": 0.0},
        {"seed": -1},
        {"logprobs": -2},
    ],
)
def test_options_out_of_range(option):
    (name,) = option
    with pytest.raises(MoecError, match=f"{name} is .* but must be"):
        SamplingParams(**option)


@pytest.mark.parametrize("top_p", [0.1, 0.9, 0.999])
@pytest.mark.parametrize("spread", [0.01, 1.0, 6.0])  # flat: the nucleus is most of the vocabulary
def test_nucleus_of_a_large_vocabulary(top_p, spread):
    """The same tokens as by sorting everything, ties included."""
    scores = np.round(fresh_rng().normal(size=20_000) * spread, 2)
    probabilities = np.exp(scores - scores.max())
    probabilities /= probabilities.sum()
    order = np.argsort(-probabilities, kind="stable")
    before = np.cumsum(probabilities[order]) - probabilities[order]
    tokens, kept = filtered_distribution(scores, SamplingParams(temperature=1.0, top_p=top_p))
    assert np.array_equal(tokens, np.sort(order[before < top_p]))
    assert kept.sum() == pytest.approx(1)
