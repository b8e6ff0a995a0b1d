"""Continuous batching over a toy device: results independent of neighbours, slots reused, prefixes kept."""

from itertools import pairwise

import numpy as np
import pytest

from moec.errors import MoecError
from moec.reference.kv_layout import KVLayout
from moec.runtime.request import Request
from moec.runtime.sampling import Sampler, SamplingParams
from moec.runtime.scheduler import PREFILL_CHUNK, Scheduler
from moec.runtime.text import StopMatcher
from tests.helpers.toy_model import ToyBackend

CONTEXT, VOCAB = 600, 97


class Letters:
    """A decoder that writes `<id>` for each token."""

    def push(self, token):
        return f"<{token}>"

    def flush(self):
        return ""


def make(prompt, max_tokens=8, temperature=0.0, seed=0, eos=(), stops=()):
    sampler = Sampler(SamplingParams(temperature=temperature, seed=seed), prompt)
    return Request(list(prompt), max_tokens, sampler, Letters(), StopMatcher(stops), frozenset(eos))


def finish(scheduler, *requests):
    for request in requests:
        scheduler.submit(request)
    while scheduler.busy:
        scheduler.round()
    return [[choice.token for choice in request.choices] for request in requests]


def device(seed, batch=4, poison=None):
    backend = ToyBackend(batch, CONTEXT, VOCAB, seed, poison)
    return Scheduler(backend), backend


def random_requests(rng, count):
    """The same requests again and again: (prompt, max_tokens, temperature, seed)."""
    specs = [
        (
            list(rng.integers(0, VOCAB, rng.integers(1, 300))),
            int(rng.integers(1, 12)),
            float(rng.choice([0, 1.0])),
        )
        for _ in range(count)
    ]
    return lambda: [make(p, n, t, seed) for seed, (p, n, t) in enumerate(specs)]


@pytest.mark.parametrize("batch", [1, 2, 3, 4])
def test_tokens_are_those_of_the_request_alone(batch, rng, seed):
    requests = random_requests(rng, 9)
    alone = [finish(device(seed, 1)[0], request)[0] for request in requests()]
    together = finish(device(seed, batch)[0], *requests())
    assert together == alone


def test_greedy_follows_the_closed_form(rng, seed):
    scheduler, backend = device(seed)
    prompt = list(rng.integers(0, VOCAB, 200))
    (tokens,) = finish(scheduler, make(prompt, 5))
    for position, token in enumerate(tokens):
        assert token == backend.model.logits(prompt + tokens[:position]).argmax()


def test_all_slots_are_used_and_refilled(rng, seed):
    scheduler, backend = device(seed, 3)
    finish(scheduler, *[make(rng.integers(0, VOCAB, 3), 10) for _ in range(7)])
    widest = max(len(slots) for slots, _ in backend.calls)
    assert widest == 3
    assert len(backend.calls) < 7 * 10  # fewer steps than one request after the other


def test_a_long_prompt_does_not_hold_up_decoding(rng, seed):
    """Between two prefill chunks of one request the other decodes."""
    scheduler, backend = device(seed, 2)
    finish(scheduler, make([1], 20), make(rng.integers(0, VOCAB, 4 * PREFILL_CHUNK), 2))
    chunks = [i for i, (_, counts) in enumerate(backend.calls) if counts == [PREFILL_CHUNK]]
    assert len(chunks) == 4
    assert all(b - a == 2 for a, b in pairwise(chunks))


def test_prefill_chunks(rng, seed):
    scheduler, backend = device(seed, 1)
    finish(scheduler, make(rng.integers(0, VOCAB, 2 * PREFILL_CHUNK + 5), 1))
    assert [counts for _, counts in backend.calls] == [[PREFILL_CHUNK], [PREFILL_CHUNK], [5]]


def test_conversation_keeps_its_prefix(rng, seed):
    scheduler, backend = device(seed, 2)
    first = make(rng.integers(0, VOCAB, 50), 6)
    (tokens,) = finish(scheduler, first)
    second = make([*first.prompt, *tokens, 3, 4], 6)
    finish(scheduler, make([5], 1))  # another request must not take the slot that holds the conversation
    backend.calls.clear()
    (kept,) = finish(scheduler, second)
    assert second.statistics.cached_tokens == 55  # the last token was sampled, not fed
    assert backend.calls[0][1] == [3]
    assert kept == finish(device(seed, 1)[0], make(second.prompt, 6))[0]


def test_same_prompt_again_runs_one_token(rng, seed):
    scheduler, _ = device(seed, 1)
    prompt = list(rng.integers(0, VOCAB, 40))
    first, again = make(prompt, 1), make(prompt, 1)
    assert finish(scheduler, first) == finish(scheduler, again)
    assert again.statistics.cached_tokens == 39


def test_prefix_beyond_rollback_is_not_kept(rng, seed):
    """A quantized cache that has moved on cannot go back 200 tokens: the prompt runs anew."""
    backend = ToyBackend(1, CONTEXT, VOCAB, seed)
    scheduler = Scheduler(backend, [KVLayout("mkv2", 2, 64, 64, CONTEXT)])
    prompt = list(rng.integers(0, VOCAB, 400))
    fork = make([*prompt[:200], (prompt[200] + 1) % VOCAB], 3)
    finish(scheduler, make(prompt, 1))
    result = finish(scheduler, fork)
    assert fork.statistics.cached_tokens == 0
    assert result == finish(device(seed, 1)[0], make(fork.prompt, 3))


@pytest.mark.parametrize(
    ("options", "reason", "count"),
    [
        ({"max_tokens": 3}, "max_tokens", 3),
        ({"max_tokens": 10**6}, "length", 51),
        ({"eos": "first"}, "eos", 1),
    ],
)
def test_stop_reasons(options, reason, count, rng, seed):
    scheduler, backend = device(seed)
    prompt = list(rng.integers(0, VOCAB, CONTEXT - 50))
    if options.get("eos"):
        options = {"eos": [int(backend.model.logits(prompt).argmax())]}
    request = make(prompt, **options)
    (tokens,) = finish(scheduler, request)
    assert (request.stop_reason, len(tokens)) == (reason, count)
    shown = tokens[:-1] if reason == "eos" else tokens
    assert "".join(request.pieces) == "".join(f"<{token}>" for token in shown)


def test_full_prompt_still_gives_one_token(rng, seed):
    request = make(rng.integers(0, VOCAB, CONTEXT), 5)
    finish(device(seed)[0], request)
    assert (request.stop_reason, len(request.choices)) == ("length", 1)


def test_stop_string_across_tokens(rng, seed):
    prompt = list(rng.integers(0, VOCAB, 9))
    (tokens,) = finish(device(seed)[0], make(prompt, 6))
    stop = f"{tokens[3]}><{tokens[4]}"
    request = make(prompt, 6, stops=[stop])
    finish(device(seed)[0], request)
    assert request.stop_reason == "stop"
    whole = "".join(f"<{token}>" for token in tokens)
    assert "".join(request.pieces) == whole[: whole.index(stop)]


def test_failure_hits_only_its_request(seed):
    """One request generates a token that the device fails on; the neighbours finish as if alone."""
    good = [make([token], 9) for token in (2, 3)]
    expected = [finish(device(seed)[0], make(request.prompt, 9))[0] for request in good]
    poison = next(t for t in range(VOCAB) if all(t not in tokens for tokens in expected) and t > 3)
    scheduler, _ = device(seed, 4, poison)
    bad = make([1], 9)
    bad.sampler = lambda logits: Sampler(SamplingParams())(np.eye(VOCAB, dtype=np.float32)[poison])
    results = finish(scheduler, good[0], bad, good[1])
    assert [results[0], results[2]] == expected
    assert bad.stop_reason == "error"
    assert "checksum mismatch" in str(bad.error)


def test_failure_in_prefill(seed):
    (expected,) = finish(device(seed)[0], make([1, 2], 4))
    poison = next(t for t in range(3, VOCAB) if t not in expected)
    scheduler, _ = device(seed, 2, poison)
    bad, good = make([1, poison, 2], 4), make([1, 2], 4)
    assert finish(scheduler, bad, good)[1] == expected
    assert (bad.stop_reason, good.stop_reason) == ("error", "max_tokens")


def test_cancelled_requests_free_their_slot(seed):
    scheduler, _ = device(seed, 1)
    running, waiting, last = make([1], 500), make([2], 5), make([3], 2)
    for request in (running, waiting, last):
        scheduler.submit(request)
    for _ in range(4):
        scheduler.round()
    running.cancelled = waiting.cancelled = True
    finish(scheduler)
    assert [r.stop_reason for r in (running, waiting, last)] == ["cancelled", "cancelled", "max_tokens"]
    assert len(running.choices) == 4
    assert waiting.choices == []


def test_interrupt_empties_the_slots(seed):
    """After Ctrl-C in the middle of a step nothing of the half-done work is used again."""
    scheduler, backend = device(seed, 2)
    request = make(list(range(20)), 30)
    scheduler.submit(request)
    scheduler.round()
    step = backend.step
    backend.step = lambda *_: (_ for _ in ()).throw(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        scheduler.round()
    backend.step = step
    assert request.stop_reason == "cancelled"
    assert not backend.lengths.any()
    assert finish(scheduler, make([4, 5], 6)) == finish(device(seed)[0], make([4, 5], 6))


def test_free_slot_waits_for_one(seed):
    scheduler, _ = device(seed, 1)
    request = make([1], 5)
    scheduler.submit(request)
    scheduler.round()
    slot = scheduler.take_free_slot()
    assert request.stop_reason == "max_tokens"
    assert slot.tokens == []


def test_bad_logits_are_the_requests_error(seed):
    scheduler, backend = device(seed, 1)
    backend.model.head[:] = np.nan
    request = make([1], 5)
    finish(scheduler, request)
    assert isinstance(request.error, MoecError)
