"""`moec run`: generate text from a bundle, once or as a conversation."""

from __future__ import annotations

import io
import os
import signal
import sys
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import click

if TYPE_CHECKING:
    from moec.runtime.session import Generation, Session

_EXAMPLES = """\b
Examples:
  moec run ./bundle --prompt "Write a haiku about rain." --max-tokens 60
  moec run ./bundle --prompt "Once upon a time" --raw --temperature 0.8 --seed 7
  echo "Summarise: ..." | moec run ./bundle --prompt -
  moec run ./bundle -i
"""
_INTERACTIVE_HELP = (
    "Ask away. /reset starts a new conversation, /quit or Ctrl-D ends, Ctrl-C stops an answer."
)


@click.command(epilog=_EXAMPLES)
@click.argument("bundle", type=click.Path())
@click.option("--prompt", "-p", help="Text to answer or to continue; - reads it from stdin.")
@click.option("--interactive", "-i", is_flag=True, help="A conversation; the cache of its turns is kept.")
@click.option("--raw", is_flag=True, help="Continue the text as it is, without the model's chat template.")
@click.option("--max-tokens", "-n", type=int, default=256, show_default=True, help="Most tokens to generate.")
@click.option("--temperature", "-t", type=float, help="0 is greedy. [default: the model's, else 0]")
@click.option("--top-k", type=int, help="Sample from the k likeliest tokens.")
@click.option("--top-p", type=float, help="Sample from the likeliest tokens that make up probability p.")
@click.option("--min-p", type=float, help="Drop tokens below min-p times the likeliest one's probability.")
@click.option("--repetition-penalty", type=float, help="Above 1 makes tokens less likely to come again.")
@click.option("--stop", multiple=True, help="Stop before this text (may be given more than once).")
@click.option("--seed", type=int, default=0, show_default=True, help="Same seed, same text.")
@click.option("--threads", type=int, help="CPU threads. [default: all physical cores]")
@click.option("--device", default="auto", show_default=True, help="auto, cpu or tensorrt.")
def run(
    bundle: str,
    prompt: str | None,
    interactive: bool,
    raw: bool,
    threads: int | None,
    device: str,
    **options: Any,
) -> int:
    """Generate text from BUNDLE, a folder made by `moec build`.

    The text streams to stdout; the last line, on stderr, says what it cost.
    """
    if (prompt is None) == (not interactive):
        raise click.UsageError("Give either --prompt TEXT or -i.")
    if interactive and raw:
        raise click.UsageError("--raw and -i exclude each other: a conversation needs the chat template.")
    from moec.runtime import load

    for stream in (sys.stdin, sys.stdout):  # characters that the terminal or the file cannot have
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")
    session = load(bundle, device, threads=threads)
    if interactive:
        return _converse(session, options)
    # Bytes that were no text in the terminal's encoding: most likely UTF-8, as all that the model read.
    text = sys.stdin.read() if prompt == "-" else os.fsencode(prompt or "").decode("utf-8", "replace")
    return _answer(lambda: session.generate(text, raw=raw, **options))[1]


def _answer(start: Callable[[], Generation]) -> tuple[str, int]:
    """Streams one answer and its statistics; returns its text and the exit code, 130 if Ctrl-C stopped it."""
    generation = start()
    try:
        with _stopped_by_ctrl_c(generation):
            for piece in generation:
                print(piece, end="", flush=True)
    finally:  # also before the message of an error
        print(flush=True)
    print(_last_line(generation), file=sys.stderr)
    return generation.text, 130 if generation.stop_reason == "cancelled" else 0


def _last_line(generation: Generation) -> str:
    reason = {"length": " | stopped: the context is full", "cancelled": " | stopped by Ctrl-C"}
    return f"{generation.stats}{reason.get(generation.stop_reason or '', '')}"


@contextmanager
def _stopped_by_ctrl_c(generation: Generation) -> Iterator[None]:
    """The first Ctrl-C ends the generation after the running step, the second interrupts."""

    def handler(_number: int, _frame: types.FrameType | None) -> None:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        generation.cancel()

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _converse(session: Session, options: dict[str, Any]) -> int:
    """Reads questions until the end of input; a turn's prompt starts with the cached tokens of the last."""
    from moec.errors import MoecError

    if session.tokenizer is None or session.tokenizer.chat_template is None:
        raise MoecError("-i needs a model with a chat template", hint="Use --prompt TEXT --raw")
    print(_INTERACTIVE_HELP, file=sys.stderr)
    messages: list[dict[str, str]] = []
    for line in _lines():
        if line == "/reset":
            messages = []
        elif line:
            messages = _turn(session, messages, line, options)
    return 0


def _turn(session: Session, messages: list[dict[str, str]], line: str, options: dict[str, Any]) -> Any:
    """Asks one question; returns the conversation with its answer, or without the question if it failed."""
    from moec.errors import MoecError

    asked = [*messages, {"role": "user", "content": line}]
    try:
        text, _ = _answer(lambda: session.generate(asked, **options))
    except MoecError as error:  # e.g. the context is full: the conversation can be reset
        print(f"error: {error}", file=sys.stderr)
        return messages
    return [*asked, {"role": "assistant", "content": text}]


def _lines() -> Iterator[str]:
    if sys.stdin.isatty():
        import readline  # noqa: F401  (gives input() line editing and history)
    while True:
        try:
            line = input("> " if sys.stdin.isatty() else "").strip()
        except EOFError:
            return
        if line == "/quit":
            return
        yield line
