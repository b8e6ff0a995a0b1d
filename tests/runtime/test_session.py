"""`Session` over a toy device with a real tokenizer."""

import threading

import numpy as np
import pytest

from moec.errors import MoecError
from moec.reference.kv_layout import KVLayout
from moec.runtime.session import Session
from moec.runtime.tokenizer import Tokenizer
from tests.helpers.tiny import VOCAB, tiny_tokenizer
from tests.helpers.toy_model import ToyBackend

CONTEXT = 300


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory):
    folders = [tmp_path_factory.mktemp("tokenizer") for _ in range(2)]
    for folder, chat in zip(folders, (True, False), strict=True):
        tiny_tokenizer(chat_template=chat).save_pretrained(folder)
    return [Tokenizer.from_folder(folder) for folder in folders]


@pytest.fixture
def session(tokenizers, seed):
    return Session(ToyBackend(3, CONTEXT, VOCAB, seed), tokenizers[0])


def test_stream_is_the_text_of_the_tokens(session):
    generation = session.generate("To be", max_tokens=30, temperature=1.0, seed=5)
    pieces = list(generation)
    assert "".join(pieces) == generation.text == session.tokenizer.decode(generation.tokens)
    assert generation.stats.generated_tokens == len(generation.tokens) == 30
    assert len(generation.stats.decode_seconds) == 29
    assert generation.stop_reason == "max_tokens"


def test_text_goes_through_the_chat_template(session):
    template = session.tokenizer.encode_chat([{"role": "user", "content": "Hail"}])
    assert session.encode("Hail") == template
    assert session.encode([{"role": "user", "content": "Hail"}]) == template
    assert session.encode("Hail", raw=True) == session.tokenizer.encode("Hail")
    assert session.encode(np.array([3, 4, 5])) == [3, 4, 5]


def test_without_a_template_text_is_raw(tokenizers, seed):
    session = Session(ToyBackend(1, CONTEXT, VOCAB, seed), tokenizers[1])
    assert session.encode("Hail") == tokenizers[1].encode("Hail")
    with pytest.raises(MoecError, match="no chat template"):
        session.generate([{"role": "user", "content": "Hail"}])


def test_same_call_same_text(session):
    options = {"max_tokens": 20, "temperature": 1.2, "seed": 9}
    first = session.generate("Fair is foul", **options).read()
    assert session.generate("Fair is foul", **options).read() == first
    assert session.generate("Fair is foul", **options | {"seed": 10}).read() != first


def test_many_requests_at_once_equal_one_by_one(session, rng):
    prompts = [list(rng.integers(4, VOCAB, rng.integers(1, 200))) for _ in range(8)]
    options = [{"max_tokens": 10, "temperature": 0.8, "seed": i} for i in range(8)]
    submitted = [session.submit(p, **o) for p, o in zip(prompts, options, strict=True)]
    session.run()
    for generation, prompt, option in zip(submitted, prompts, options, strict=True):
        again = session.generate(prompt, **option)
        again.read()
        assert generation.tokens == again.tokens


def test_reading_one_drives_the_others(session):
    first, second = session.submit([5], max_tokens=10), session.submit([6], max_tokens=10)
    first.read()
    assert len(second.tokens) >= 8


def test_dropped_generation_frees_its_slot(session):
    for _ in range(10):
        next(session.generate([5], max_tokens=200, temperature=1.0))
    last = session.generate([7], max_tokens=3)
    last.read()
    assert last.stop_reason == "max_tokens"
    assert sum(slot.request is not None for slot in session._scheduler.slots) == 0


def test_cancel(session):
    generation = session.generate([5], max_tokens=200, temperature=1.0)
    next(generation)
    generation.cancel()
    generation.read()
    assert generation.stop_reason == "cancelled"
    assert len(generation.tokens) < 20


def test_generations_from_threads(session):
    expected = session.generate([5, 6], max_tokens=15, temperature=1.0, seed=3).read()
    results = []

    def work():
        results.append(session.generate([5, 6], max_tokens=15, temperature=1.0, seed=3).read())

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert results == [expected] * 6


def test_score_is_the_closed_form_in_any_chunks(session, rng):
    tokens = list(rng.integers(0, VOCAB, 50))
    model = session.backend.model
    expected = np.stack([model.logits(tokens[: i + 1]) for i in range(50)])
    for chunk in (1, 7, 128):
        np.testing.assert_array_equal(session.score(tokens, chunk=chunk), expected)


@pytest.mark.parametrize("token", [-1, VOCAB, 2**40])
def test_score_refuses_tokens_that_the_model_does_not_have(session, token):
    with pytest.raises(MoecError, match=rf"token id outside 0\.\.{VOCAB - 1}"):
        session.score([1, token])


def test_score_refuses_empty_chunks(session):
    with pytest.raises(MoecError, match="chunk is -1"):
        session.score([1, 2], chunk=-1)


def test_score_beside_running_generations(session, rng):
    tokens = rng.integers(0, VOCAB, 20)
    alone = session.score(tokens)
    running = [session.submit([5, i], max_tokens=30) for i in range(5)]
    next(running[0])
    np.testing.assert_array_equal(session.score(tokens), alone)
    expected = session.generate([5, 1], max_tokens=30)
    expected.read()
    running[1].read()
    assert running[1].tokens == expected.tokens


def test_prompt_too_long_says_the_numbers(session):
    with pytest.raises(MoecError, match="prompt has 301 tokens, but a slot of this bundle holds 300"):
        session.generate([5] * 301)
    with pytest.raises(MoecError, match="301"):
        session.score([5] * 301)


def test_context_full(session):
    generation = session.generate([5] * 290, max_tokens=100, ignore_eos=True)
    generation.read()
    assert (generation.stop_reason, len(generation.tokens)) == ("length", 11)


def test_empty_prompt_starts_from_the_begin_token(session):
    assert session.encode("", raw=True) == [session.tokenizer.bos_id]
    assert session.generate("", raw=True, max_tokens=2).read() is not None


def test_empty_prompt_without_a_start(seed):
    with pytest.raises(MoecError, match="prompt is empty"):
        Session(ToyBackend(1, CONTEXT, VOCAB, seed)).generate([])


def test_token_out_of_range(session):
    with pytest.raises(MoecError, match=r"outside 0\.\.511"):
        session.generate([512])


def test_no_tokenizer(seed):
    session = Session(ToyBackend(1, CONTEXT, VOCAB, seed))
    generation = session.generate([1, 2], max_tokens=4)
    assert generation.read() == ""
    assert len(generation.tokens) == 4
    with pytest.raises(MoecError, match="no tokenizer"):
        session.generate("text")


@pytest.mark.parametrize("option", [{"max_tokens": 0}, {"temperature": -1}, {"top_p": 3.0}])
def test_bad_options(session, option):
    with pytest.raises(MoecError, match="must be"):
        session.generate([5], **option)


def test_defaults_of_the_checkpoint(tokenizers, seed):
    """do_sample makes sampling the default; given options win; without it the answer is greedy."""
    backend = ToyBackend(1, CONTEXT, VOCAB, seed)
    sampling = Session(backend, tokenizers[0], defaults={"do_sample": True, "temperature": 0.7, "top_k": 20})
    params = sampling.generate([5])._request.sampler.params
    assert (params.temperature, params.top_k, params.top_p) == (0.7, 20, 1.0)
    assert sampling.generate([5], temperature=0)._request.sampler.params.temperature == 0
    greedy = Session(backend, tokenizers[0], defaults={"temperature": 0.7, "top_p": 0.8})
    params = greedy.generate([5])._request.sampler.params
    assert (params.temperature, params.top_p) == (0.0, 1.0)


def test_end_token_is_not_shown_and_can_be_ignored(tokenizers, seed):
    backend = ToyBackend(1, CONTEXT, VOCAB, seed)
    first = int(backend.model.logits([5]).argmax())
    session = Session(backend, tokenizers[0], eos_ids=[first])
    generation = session.generate([5], max_tokens=3)
    assert generation.read() == ""
    assert (generation.stop_reason, generation.tokens) == ("eos", [first])
    assert session.generate([5], max_tokens=3, ignore_eos=True).read() is not None


def test_cache_statistics(tokenizers, seed):
    layouts = [KVLayout("fp32", 2, 64, 64, CONTEXT), KVLayout("mkv2", 1, 32, 16, CONTEXT)]
    session = Session(ToyBackend(3, CONTEXT, VOCAB, seed), tokenizers[0], layouts=layouts)
    stats = session.generate([5]).stats
    assert stats.cache_fp16_bytes == 3 * CONTEXT * 2 * (2 * 128 + 48)
    assert stats.cache_bytes == session.backend.cache_bytes


def test_logprobs(session):
    generation = session.generate([5], max_tokens=3, logprobs=2)
    generation.read()
    for position, choice in enumerate(generation.choices):
        logits = session.backend.model.logits([5, *generation.tokens[:position]]).astype(np.float64)
        expected = logits[choice.token] - np.log(np.exp(logits).sum())
        assert choice.logprob == pytest.approx(expected)
        assert len(choice.top_logprobs) == 2
