"""`Session`: a loaded bundle that generates text and scores tokens."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from moec.errors import MoecError
from moec.reference.kv_layout import KVLayout
from moec.runtime.chat_template import Message
from moec.runtime.request import Request
from moec.runtime.sampling import Choice, Sampler, SamplingParams
from moec.runtime.scheduler import PREFILL_CHUNK, Backend, Scheduler
from moec.runtime.statistics import Statistics
from moec.runtime.text import StopMatcher
from moec.runtime.tokenizer import Tokenizer

Prompt = str | Sequence[int] | Sequence[Message]


class Generation:
    """A running request. Iterating yields its text piece by piece and drives every request of the session.

    Attributes:
        text: All text so far, also what was already yielded.
    """

    def __init__(self, session: Session, request: Request) -> None:
        self._session, self._request = session, request
        self.text = ""

    def __iter__(self) -> Generation:
        return self

    def __next__(self) -> str:
        """The next piece of text.

        Raises:
            MoecError: The request failed in the model.
        """
        while not self._request.pieces:
            if self._request.error:
                raise self._request.error
            if self._request.stop_reason:
                raise StopIteration
            self._session._round()
        piece = self._request.pieces.popleft()
        self.text += piece
        return piece

    def read(self) -> str:
        """Runs to the end and returns the whole text."""
        for _ in self:
            pass
        return self.text

    def cancel(self) -> None:
        """Stops the request before its next token; the iterator then ends. Safe in a signal handler."""
        self._request.cancelled = True

    def __del__(self) -> None:
        self._request.cancelled = True  # nobody reads it any more: its slot goes to the next

    @property
    def tokens(self) -> list[int]:
        """Token ids generated so far, an end token included."""
        return [choice.token for choice in self._request.choices]

    @property
    def choices(self) -> list[Choice]:
        """The generated tokens with their log-probabilities, where asked for."""
        return list(self._request.choices)

    @property
    def stop_reason(self) -> str | None:
        """None while running, else eos | stop | max_tokens | length (context full) | cancelled | error."""
        return self._request.stop_reason

    @property
    def stats(self) -> Statistics:
        return self._request.statistics


class Session:
    """A bundle loaded on a device. Made by `moec.load`.

    One thread at a time runs the model; generations may be consumed from several threads.

    Args:
        backend: The device.
        tokenizer: None if the bundle has none: then prompts are token ids and the text is empty.
        layouts: The cache layout of every attention layer.
        eos_ids: Tokens that end an answer.
        defaults: Sampling defaults of the checkpoint (`do_sample`, `temperature`, ...).
    """

    def __init__(
        self,
        backend: Backend,
        tokenizer: Tokenizer | None = None,
        *,
        layouts: Sequence[KVLayout] = (),
        eos_ids: Sequence[int] = (),
        defaults: Mapping[str, Any] | None = None,
    ) -> None:
        self.backend, self.tokenizer = backend, tokenizer
        self._eos_ids = frozenset(eos_ids)
        self._defaults = _sampling_defaults(defaults or {})
        self._scheduler = Scheduler(backend, layouts)
        self._fp16_bytes = 2 * sum(_elements(layout) for layout in layouts) * backend.batch
        self._lock = threading.RLock()

    @property
    def context(self) -> int:
        """Tokens a conversation can have, prompt and answer together."""
        return self.backend.context

    def generate(self, prompt: Prompt, **options: Any) -> Generation:
        """Starts a generation and returns its stream; nothing runs before its first piece is asked for.

        Args:
            prompt: Text (put into the chat template as one user message, unless `raw` or there is no
                template), messages (dictionaries with `role` and `content`), or token ids (used as they are).
            max_tokens: Most tokens to generate, 256.
            temperature, top_k, top_p, min_p, repetition_penalty: As in `SamplingParams`; None takes the
                checkpoint's default, and greedy if it has none.
            seed: Seed of this request, 0: the same call gives the same text.
            stop: Strings that end the answer; they are not part of it.
            logprobs: None, or how many log-probabilities to report with each token.
            raw: Take the text as it is, without chat template.
            ignore_eos: Go on past the model's end tokens.

        Raises:
            MoecError: The prompt does not fit the context, or an option is out of range.
        """
        return self.submit(prompt, **options)

    def submit(
        self,
        prompt: Prompt,
        *,
        max_tokens: int = 256,
        temperature: float | None = None,
        top_k: int | None = None,
        top_p: float | None = None,
        min_p: float | None = None,
        repetition_penalty: float | None = None,
        seed: int = 0,
        stop: str | Sequence[str] = (),
        logprobs: int | None = None,
        raw: bool = False,
        ignore_eos: bool = False,
    ) -> Generation:
        """Queues a request beside others; as `generate`. `run` finishes all; dropping the result cancels."""
        given = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p": min_p}
        given |= {"repetition_penalty": repetition_penalty, "seed": seed, "logprobs": logprobs}
        params = SamplingParams(**self._defaults | {k: v for k, v in given.items() if v is not None})
        if max_tokens < 1:
            raise MoecError(f"max_tokens is {max_tokens}, but must be at least 1")
        tokens = self.encode(prompt, raw=raw)
        self._check_length(tokens)
        stops = StopMatcher([stop] if isinstance(stop, str) else stop)
        eos_ids = frozenset() if ignore_eos else self._eos_ids
        statistics = Statistics(
            len(tokens), cache_bytes=self.backend.cache_bytes, cache_fp16_bytes=self._fp16_bytes
        )
        decoder = self._stream_decoder(tokens)
        request = Request(tokens, max_tokens, Sampler(params, tokens), decoder, stops, eos_ids, statistics)
        with self._lock:
            self._scheduler.submit(request)
        return Generation(self, request)

    def run(self) -> None:
        """Runs until every submitted request is finished; their text waits in the generations."""
        while self._scheduler.busy:
            self._round()

    def encode(self, prompt: Prompt, *, raw: bool = False) -> list[int]:
        """The token ids of a prompt as `generate` takes it; never empty.

        Raises:
            MoecError: It is empty and the model has no start token; no tokenizer; no chat template.
        """
        tokens = self._tokens_of(prompt, raw)
        if not tokens and self.tokenizer is not None:
            start = self.tokenizer.bos_id if self.tokenizer.bos_id is not None else self.tokenizer.eos_id
            tokens = [] if start is None else [start]
        if not tokens:
            raise MoecError("The prompt is empty and the model has no start token", hint="Give some text")
        self._check_ids(tokens)
        return tokens

    def score(self, token_ids: Sequence[int] | np.ndarray, *, chunk: int = PREFILL_CHUNK) -> np.ndarray:
        """Logits after every token, with the cache exactly as in decoding.

        Args:
            token_ids: S tokens, at most `context`.
            chunk: Tokens a run, at least 1; does not change the result.

        Returns:
            float32 `[S,V]`; row i is the distribution of token i+1.

        Raises:
            MoecError: Too many tokens, one that the model does not have, or an operator failed.
        """
        if chunk < 1:
            raise MoecError(f"chunk is {chunk}, but must be at least 1")
        tokens = np.asarray(token_ids, np.int64).reshape(-1)
        self._check_length(tokens)
        self._check_ids(tokens)
        with self._lock:
            slot = self._scheduler.take_free_slot()
            result = np.empty((len(tokens), self.backend.vocab_size), np.float32)
            try:
                for start in range(0, len(tokens), chunk):
                    ids = tokens[start : start + chunk].astype(np.int32)
                    result[start : start + len(ids)] = self.backend.step_all(
                        ids[None], [slot.index], [len(ids)]
                    )[0]
            finally:
                self._scheduler.forget(slot)
        return result

    def _round(self) -> None:
        with self._lock:
            self._scheduler.round()

    def _tokens_of(self, prompt: Prompt, raw: bool) -> list[int]:
        if not isinstance(prompt, str) and all(isinstance(item, (int, np.integer)) for item in prompt):
            return [int(token) for token in prompt]
        if self.tokenizer is None:
            raise MoecError("This bundle has no tokenizer", hint="Give token ids as the prompt")
        if not isinstance(prompt, str):
            return self.tokenizer.encode_chat(prompt)
        if raw or self.tokenizer.chat_template is None:
            return self.tokenizer.encode(prompt)
        return self.tokenizer.encode_chat([{"role": "user", "content": prompt}])

    def _check_ids(self, tokens: Sequence[int] | np.ndarray) -> None:
        vocab = self.backend.vocab_size
        if not all(0 <= token < vocab for token in tokens):
            raise MoecError(f"The prompt has a token id outside 0..{vocab - 1}")

    def _check_length(self, tokens: Sequence[int] | np.ndarray) -> None:
        if len(tokens) > self.context:
            raise MoecError(
                f"The prompt has {len(tokens)} tokens, but a slot of this bundle holds {self.context}",
                hint="Shorten it, or build the bundle with a larger --context",
            )

    def _stream_decoder(self, prompt: list[int]) -> Any:
        if self.tokenizer is None:
            return _NoText()
        return self.tokenizer.stream(prompt)


class _NoText:
    """Stands for a decoder where there is no tokenizer."""

    def push(self, token: int) -> str:
        return ""

    def flush(self) -> str:
        return ""


def _sampling_defaults(generation: Mapping[str, Any]) -> dict[str, Any]:
    """The sampling options of a generation_config.json; temperature 0 unless it samples."""
    names = ("repetition_penalty",)
    if generation.get("do_sample"):
        names += ("temperature", "top_k", "top_p", "min_p")
    defaults = {"temperature": 1.0} if generation.get("do_sample") else {}
    return defaults | {name: generation[name] for name in names if generation.get(name) is not None}


def _elements(layout: KVLayout) -> int:
    return layout.num_kv_heads * layout.context * layout.row_dim
