"""Streaming text: never a broken character, nothing of a stop string, pieces that join to the whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from moec.runtime.text import StopMatcher, StreamDecoder


def byte_level():
    """Every byte is a token: characters of up to four tokens."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE({c: i for i, c in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<|end|>"])
    return tokenizer


def llama_like():
    """A sentencepiece-style tokenizer: spaces are part of the token, other characters fall back to bytes."""
    words = ["<unk>", *[f"<0x{b:02X}>" for b in range(256)], "▁hello", "▁world", "▁", "a"]
    tokenizer = Tokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [], unk_token="<unk>", byte_fallback=True)
    )
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return tokenizer


BYTES, LLAMA = byte_level(), llama_like()


def stream(tokenizer, tokens, context=()):
    decoder = StreamDecoder(lambda ids: tokenizer.decode(ids), list(context))
    return [decoder.push(token) for token in tokens] + [decoder.flush()]


@settings(max_examples=200, deadline=None)
@given(st.text(max_size=30), st.text(max_size=12))
def test_pieces_join_to_the_text(text, context):
    pieces = stream(BYTES, BYTES.encode(text).ids, BYTES.encode(context).ids)
    assert "".join(pieces) == text


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="aé€😀", min_size=1, max_size=20))
def test_no_piece_has_a_broken_character(text):
    assert not any("\ufffd" in piece for piece in stream(BYTES, BYTES.encode(text).ids))


@settings(max_examples=100, deadline=None)
@given(st.text(alphabet="é€😀", min_size=1, max_size=6))
def test_byte_fallback_tokens(text):
    tokens = [LLAMA.token_to_id(f"<0x{b:02X}>") for b in text.encode()]
    pieces = stream(LLAMA, tokens)
    assert "".join(pieces) == text
    assert not any("\ufffd" in piece for piece in pieces)


def test_space_before_the_first_word_depends_on_the_prompt():
    hello, world = LLAMA.token_to_id("▁hello"), LLAMA.token_to_id("▁world")
    assert stream(LLAMA, [world, hello], [hello])[:2] == [" world", " hello"]
    assert stream(LLAMA, [world, hello])[:2] == ["world", " hello"]


def test_special_tokens_have_no_text_and_do_not_disturb():
    end = BYTES.token_to_id("<|end|>")
    euro = BYTES.encode("€").ids
    assert "".join(stream(BYTES, [end, *euro, end, end, *euro])) == "€€"


def test_unfinished_character_at_the_end_comes_out_once():
    pieces = stream(BYTES, BYTES.encode("a€").ids[:-1])
    assert pieces == ["a", "", "", "\ufffd"]


def test_random_bytes_do_not_stall(rng):
    """Garbage is shown at the latest after 16 tokens, not held back for good."""
    tokens = rng.integers(0, 256, 500)
    pieces = stream(BYTES, [int(t) for t in tokens])
    gaps = np.diff(np.flatnonzero([bool(p) for p in pieces]))
    assert gaps.max() <= 17


@pytest.mark.parametrize(
    ("pieces", "stops", "shown", "stopped"),
    [
        (["hello ", "wor", "ld"], ["world"], "hello ", True),
        (["ab", "ab", "ac!"], ["abac"], "ab", True),
        (["a<", "b"], ["<end>"], "a<b", False),
        (["one two"], ["two", "one"], "", True),
        (["x", "y"], [], "xy", False),
        (["x", "y"], [""], "xy", False),
        (["aaa", "aaab"], ["aab"], "aaaa", True),
    ],
)
def test_stop_strings(pieces, stops, shown, stopped):
    matcher = StopMatcher(stops)
    results = [matcher.push(piece) for piece in pieces]
    assert [flag for _, flag in results].count(True) == stopped
    assert "".join(text for text, _ in results) + matcher.flush() == shown


@settings(max_examples=300, deadline=None)
@given(st.lists(st.text(alphabet="ab", max_size=4)), st.lists(st.text(alphabet="ab", min_size=1), min_size=1))
def test_stop_at_the_first_place_the_stream_could_know(pieces, stops):
    """Shown text is the text before the earliest match of the first prefix of the stream that has a match."""
    matcher, shown = StopMatcher(stops), ""
    for count, piece in enumerate(pieces, 1):
        text, stopped = matcher.push(piece)
        shown += text
        whole = "".join(pieces[:count])
        places = [whole.find(stop) for stop in stops if stop in whole]
        assert stopped == bool(places)
        if stopped:
            assert shown == whole[: min(places)]
            return
        held = whole[len(shown) :]
        assert whole.startswith(shown)
        assert not held or any(stop.startswith(held) for stop in stops)
    assert shown + matcher.flush() == "".join(pieces)
