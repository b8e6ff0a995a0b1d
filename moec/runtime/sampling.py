"""Choosing the next token: greedy or random, with the usual filters, one generator per request.

The filters run in the order of transformers' logits processors (repetition penalty, temperature, top-k,
top-p, min-p) and mean the same; arithmetic is float64. A request draws from its own generator, so its tokens
do not depend on other requests.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from moec.errors import MoecError


@dataclass(frozen=True)
class SamplingParams:
    """How to sample.

    Args:
        temperature: 0 is greedy: the highest logit, the lowest token id among equals.
        top_k: Keep the k highest logits (and those equal to the k-th); 0 keeps all.
        top_p: Keep the fewest most likely tokens whose probabilities reach top_p (Holtzman et al. 2020).
        min_p: Keep tokens with at least min_p times the probability of the likeliest (Nguyen et al. 2024).
        repetition_penalty: Divides positive and multiplies negative logits of tokens that the prompt or the
            output has (Keskar et al. 2019).
        seed: Seed of the request's own generator (PCG64).
        logprobs: None, or how many of the likeliest tokens to report with their log-probability. These are of
            the model's own distribution, before any filter.

    Raises:
        MoecError: A value out of range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int = 0
    logprobs: int | None = None

    def __post_init__(self) -> None:
        warm = math.isfinite(self.temperature) and self.temperature >= 0
        _require(warm, "temperature", self.temperature, ">= 0 and finite")
        _require(self.top_k >= 0, "top_k", self.top_k, ">= 0 (0 keeps every token)")
        _require(0 < self.top_p <= 1, "top_p", self.top_p, "in (0, 1]")
        _require(0 <= self.min_p <= 1, "min_p", self.min_p, "in [0, 1]")
        penalty = self.repetition_penalty
        _require(math.isfinite(penalty) and penalty > 0, "repetition_penalty", penalty, "> 0")
        _require(self.seed >= 0, "seed", self.seed, ">= 0")
        _require(self.logprobs is None or self.logprobs >= 0, "logprobs", self.logprobs, ">= 0")


def _require(ok: bool, name: str, value: object, rule: str) -> None:
    if not ok:
        raise MoecError(f"{name} is {value}, but must be {rule}")


_FEW = 256  # entries that hold the nucleus of most distributions


@dataclass(frozen=True)
class Choice:
    """A sampled token; log-probabilities (natural) only if they were asked for."""

    token: int
    logprob: float | None = None
    top_logprobs: tuple[tuple[int, float], ...] = ()


class Sampler:
    """The sampling state of one request: its generator and the tokens it has seen."""

    def __init__(self, params: SamplingParams, prompt: Iterable[int] = ()) -> None:
        self.params = params
        self._generator = np.random.Generator(np.random.PCG64(params.seed))
        self._seen = set(prompt)

    def __call__(self, logits: np.ndarray) -> Choice:
        """Chooses from float32 logits `[V]` and remembers the choice.

        Raises:
            MoecError: The logits have a NaN or no finite value.
        """
        if not np.isfinite(logits.max()):  # max() hands a NaN on
            raise MoecError("The model produced logits that are not finite numbers")
        token = self._choose(self._penalised(logits))
        self._seen.add(token)
        return self._report(token, logits)

    def distribution(self, logits: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """The tokens that can be drawn and their float64 probabilities (temperature > 0)."""
        return filtered_distribution(self._penalised(logits), self.params)

    def _choose(self, scores: np.ndarray) -> int:
        if self.params.temperature == 0:
            return int(scores.argmax())
        tokens, probabilities = filtered_distribution(scores, self.params)
        bounds = np.cumsum(probabilities)
        drawn = np.searchsorted(bounds, self._generator.random() * bounds[-1], side="right")
        return int(tokens[min(drawn, len(tokens) - 1)])

    def _penalised(self, logits: np.ndarray) -> np.ndarray:
        penalty = self.params.repetition_penalty
        if penalty == 1.0 and self.params.temperature == 0:
            return logits  # greedy: nothing to compute
        scores = logits.astype(np.float64)
        if penalty != 1.0 and self._seen:
            seen = np.fromiter(self._seen, dtype=np.int64, count=len(self._seen))
            values = scores[seen]
            scores[seen] = np.where(values < 0, values * penalty, values / penalty)
        return scores

    def _report(self, token: int, logits: np.ndarray) -> Choice:
        count = self.params.logprobs
        if count is None:
            return Choice(token)
        scores = logits.astype(np.float64)
        logprobs = scores - (scores.max() + math.log(np.exp(scores - scores.max()).sum()))
        best = _highest(logprobs, count)
        top = tuple((int(t), float(logprobs[t])) for t in best)
        return Choice(token, float(logprobs[token]), top)


def filtered_distribution(scores: np.ndarray, params: SamplingParams) -> tuple[np.ndarray, np.ndarray]:
    """Applies temperature, top-k, top-p and min-p to float64 scores `[V]`: (token ids, probabilities)."""
    tokens = np.arange(len(scores))
    if 0 < params.top_k < len(scores):
        threshold = np.partition(scores, -params.top_k)[-params.top_k]
        tokens = np.flatnonzero(scores >= threshold)
    probabilities = _softmax(scores[tokens] / params.temperature)
    if params.top_p < 1:
        kept = _nucleus(probabilities, params.top_p)
        tokens, probabilities = tokens[kept], _normalised(probabilities[kept])
    if params.min_p > 0:
        kept = probabilities >= params.min_p * probabilities.max()
        tokens, probabilities = tokens[kept], _normalised(probabilities[kept])
    return tokens, probabilities


def _nucleus(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    """Indices, ascending, of the fewest likeliest entries whose sum reaches top_p."""
    likely = _likely(probabilities, top_p)
    order = likely[np.argsort(-probabilities[likely], kind="stable")]
    before = np.cumsum(probabilities[order]) - probabilities[order]
    return np.sort(order[before < top_p])


def _likely(probabilities: np.ndarray, top_p: float) -> np.ndarray:
    """Indices, ascending, of entries that hold the nucleus: to sort a whole vocabulary takes milliseconds."""
    if len(probabilities) > _FEW:
        found = np.flatnonzero(probabilities >= np.partition(probabilities, -_FEW)[-_FEW])
        if probabilities[found].sum() > top_p + 1e-9:
            return found
    return np.arange(len(probabilities))


def _softmax(scores: np.ndarray) -> np.ndarray:
    return _normalised(np.exp(scores - scores.max()))


def _normalised(weights: np.ndarray) -> np.ndarray:
    return weights / weights.sum()


def _highest(values: np.ndarray, count: int) -> np.ndarray:
    """Indices of the `count` highest values, highest first, lower index first among equals."""
    return np.argsort(-values, kind="stable")[:count]
