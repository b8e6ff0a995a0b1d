"""Passkey and multi-key retrieval over 8192 cached tokens: synthetic attention problems with known answers.

Keys have loud channels and a mean, as in real models. The query of a needle is tuned to its key, its value is
a word of a code book; the answer is the word that the attention output is nearest to. Decoys have keys like a
needle's and other words.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import pytest

from moec.calibrate.fit import fit_layer
from moec.calibrate.statistics import LayerStatistics
from moec.reference.kv_cache import KVLayout, KVState
from tests.helpers.cpu_op import CpuOp

TOKENS, DIM, WORDS = 8192, 64, 64
SCALE = DIM**-0.5
F32 = np.float32


@dataclass
class Problem:
    """Needles at `places`, each with its query `[n,D]` and its word; `k`, `v` `[TOKENS,D]`."""

    k: np.ndarray
    v: np.ndarray
    q: np.ndarray
    places: np.ndarray
    words: np.ndarray
    book: np.ndarray

    def correct(self, out: np.ndarray) -> float:
        """Share of right answers, of attention outputs `[n,D]`."""
        return float(((out @ self.book.T).argmax(-1) == self.words[self.places]).mean())


def directions(rng: np.random.Generator, count: int) -> np.ndarray:
    """Random vectors of length sqrt(DIM), `[count,DIM]`."""
    x = rng.standard_normal((count, DIM))
    return x * np.sqrt(DIM) / np.linalg.norm(x, axis=1, keepdims=True)


def make_problem(rng: np.random.Generator, needles: int, decoys: int, likeness: float) -> Problem:
    """`needles` needles, spread over all depths, with `decoys` decoys each."""
    u = directions(rng, TOKENS)
    spread, mean = np.exp(rng.standard_normal(DIM)), 4 * rng.standard_normal(DIM)
    places = np.sort(rng.choice(TOKENS - 200, needles, replace=False))
    others = rng.permutation(np.setdiff1d(np.arange(TOKENS), places))[: needles * decoys]
    near = np.repeat(places, decoys)
    u[others] = likeness * u[near] + np.sqrt(1 - likeness**2) * u[others]
    book = directions(rng, WORDS)
    words = rng.integers(0, WORDS, TOKENS)
    words[others] = (words[near] + rng.integers(1, WORDS, others.size)) % WORDS
    q = 2.0 * u[places] / spread
    k, v, q = (x.astype(F32) for x in (u * spread + mean, book[words], q))
    return Problem(k, v, q, places, words, book)


def answers(problem: Problem, format: str, lose_blocks: bool = False) -> np.ndarray:
    """Attention outputs of the needles' queries, asked one after the other behind the text."""
    needles = len(problem.q)
    layout = KVLayout(format, 1, DIM, DIM, TOKENS + needles)
    statistics = LayerStatistics(layout)
    window = slice(0, 1024)
    of_queries = np.resize(problem.q, (1024, DIM))[None]
    statistics.add(of_queries, problem.k[None, window], problem.v[None, window])
    c, state = fit_layer(statistics), KVState.empty(layout, 1)
    op = CpuOp(
        "AsymKVAttention", scale=SCALE, format=format, promoted=layout.promoted,
        sink_tokens=layout.sink_tokens, recent_tokens=layout.recent_tokens,
    )  # fmt: skip
    tensors = dict(
        blocks=state.blocks, ring=state.ring, slot_ids=np.zeros(1, np.int32), k_mean=c.k_mean, k_ref=c.k_ref,
        k_order=c.k_order, v_ref=c.v_ref, sink_logits=np.zeros(1, F32),
    )  # fmt: skip
    idle = np.zeros((TOKENS, DIM), F32)
    usual = np.broadcast_to(problem.k.mean(0), (needles, DIM))  # keys of the queries' own positions
    for start, q, k, v in ((0, idle, problem.k, problem.v), (TOKENS, problem.q, usual, idle[:needles])):
        parts = {name: x[None, :, None] for name, x in (("q", q), ("k", k), ("v", v))}
        counts = dict(lengths=np.array([start], np.int32), num_tokens=np.array([len(q)], np.int32))
        out = op(in_place=True, **parts, **counts, **tensors)[0]
        if lose_blocks:
            state.blocks[:] = 0
    return out[0]


PROBLEMS = {"passkey": (1, 0, 0.0), "multi-key": (100, 3, 0.4)}


@pytest.mark.parametrize("kind", PROBLEMS)
def test_nothing_is_lost_against_fp16(rng, kind):
    for _ in range(3 if kind == "passkey" else 1):
        problem = make_problem(rng, *PROBLEMS[kind])
        assert problem.correct(answers(problem, "fp16")) == 1.0
        for format in ("mkv2", "mkv2_lean", "k4v2", "int8"):
            assert problem.correct(answers(problem, format)) == 1.0, format


def test_the_answers_come_from_the_blocks(rng):
    problem = make_problem(rng, *PROBLEMS["multi-key"])
    assert problem.correct(answers(problem, "mkv2", lose_blocks=True)) < 0.2
