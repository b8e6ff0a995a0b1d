"""One generation request: what it wants, where it stands, the text it has produced."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from moec.runtime.sampling import Choice, Sampler
from moec.runtime.statistics import Statistics
from moec.runtime.text import StopMatcher, StreamDecoder

STOP_REASONS = {
    "eos": "the model ended its answer",
    "stop": "a stop string was met",
    "max_tokens": "the requested number of tokens was reached",
    "length": "the slot's context is full",
    "cancelled": "the request was cancelled",
    "error": "an operator failed; the error was raised",
}


@dataclass(eq=False)
class Request:
    """State of a request; the scheduler alone changes it, except `cancelled`.

    Attributes:
        prompt: Token ids, at least one.
        eos_ids: Tokens that end the answer (not part of its text).
        fed: Tokens of prompt + answer that the scheduler has put through the model.
        choices: Sampled tokens, an end token included.
        pieces: Text not yet taken by the consumer.
        stop_reason: None while running, else a key of `STOP_REASONS`.
    """

    prompt: list[int]
    max_tokens: int
    sampler: Sampler
    decoder: StreamDecoder
    stops: StopMatcher
    eos_ids: frozenset[int]
    statistics: Statistics = field(default_factory=Statistics)
    choices: list[Choice] = field(default_factory=list)
    pieces: deque[str] = field(default_factory=deque)
    stop_reason: str | None = None
    error: Exception | None = None
    cancelled: bool = False

    @property
    def prefilled(self) -> bool:
        """Whether the first token was sampled, so that the next step is a decode step."""
        return bool(self.choices)

    def accept(self, choice: Choice, room: bool) -> None:
        """Takes the next token; `room`: the slot can hold it, so another can follow."""
        self.choices.append(choice)
        self.statistics.generated_tokens += 1
        if choice.token in self.eos_ids:
            self.finish("eos")
            return
        if self._show(self.decoder.push(choice.token)):
            self._end("stop")
        elif len(self.choices) >= self.max_tokens:
            self.finish("max_tokens")
        elif not room:
            self.finish("length")

    def finish(self, reason: str) -> None:
        """Ends the request and gives out the text that was held back."""
        stopped = self._show(self.decoder.flush())
        self._append("" if stopped else self.stops.flush())
        self._end("stop" if stopped else reason)

    def fail(self, error: Exception) -> None:
        self.error = error
        self._end("error")

    def _end(self, reason: str) -> None:
        self.stop_reason = reason

    def _show(self, text: str) -> bool:
        safe, stopped = self.stops.push(text)
        self._append(safe)
        return stopped

    def _append(self, text: str) -> None:
        if text:
            self.pieces.append(text)
