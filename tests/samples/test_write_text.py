"""Cleaning of the calibration text, and what is committed of it."""

from __future__ import annotations

from samples.smolmoe.write_text import MAX_BYTES, OUTPUT, clean, compose, is_useful

LONG = clean(OUTPUT.read_text()[:1500])


def test_clean_cuts_after_the_last_sentence_and_keeps_ascii() -> None:
    text = "\u201cWell,\u201d she said \u2014 it\u2019s late\u2026 Go home.  \nHe would n"
    assert clean(text) == '"Well," she said - it\'s late. Go home.'


def test_loops_and_short_answers_are_dropped() -> None:
    assert is_useful(LONG)
    assert not is_useful("Yes.")
    assert not is_useful("I do not know what to say. " * 40)


def test_compose_keeps_whole_answers_up_to_the_limit() -> None:
    assert compose(iter([LONG, "Yes.", LONG]), 10 * len(LONG)) == f"{LONG}\n\n{LONG}\n"
    assert compose(iter([LONG, LONG]), len(LONG) + 10) == f"{LONG}\n"


def test_committed_text_is_plain_and_about_100_kb() -> None:
    data = OUTPUT.read_bytes()
    assert 90_000 <= len(data) <= MAX_BYTES
    assert data.isascii()
