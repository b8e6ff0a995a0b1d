"""Continuous batching: many requests over the bundle's B slots.

Each round admits waiting requests to free slots, runs one prefill chunk of the oldest request that has one to
do, and one decode step for all others. A finished slot keeps its tokens: a request that starts with them goes
on there.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from moec.errors import MoecError
from moec.reference.kv_layout import KVLayout
from moec.runtime.request import Request
from moec.runtime.rollback import can_roll_back, common_prefix

PREFILL_CHUNK = 128


class Backend(Protocol):
    """What a device must offer; `moec.runtime.backends.cpu.CpuBackend` documents it."""

    batch: int
    context: int
    vocab_size: int
    lengths: np.ndarray
    cache_bytes: int
    recurrent: bool

    def set_length(self, slot: int, length: int) -> None: ...
    def step(
        self, input_ids: np.ndarray, slot_ids: Sequence[int], num_tokens: Sequence[int]
    ) -> np.ndarray: ...
    def step_all(
        self, input_ids: np.ndarray, slot_ids: Sequence[int], num_tokens: Sequence[int]
    ) -> np.ndarray: ...


@dataclass
class Slot:
    """A batch row: the tokens in its cache, the request that has it, when it was last used."""

    index: int
    tokens: list[int] = field(default_factory=list)
    request: Request | None = None
    used: int = 0


class Scheduler:
    """Runs requests; not thread-safe.

    Args:
        backend: The device.
        layouts: The cache layout of every attention layer, to know what can be kept.
    """

    def __init__(self, backend: Backend, layouts: Sequence[KVLayout] = ()) -> None:
        self.backend, self._layouts = backend, tuple(layouts)
        self.slots = [Slot(index) for index in range(backend.batch)]
        self._waiting: deque[Request] = deque()
        self._clock = 0

    def submit(self, request: Request) -> None:
        self._waiting.append(request)

    @property
    def busy(self) -> bool:
        """Whether any request waits or runs."""
        return bool(self._waiting) or any(slot.request for slot in self.slots)

    def round(self) -> None:
        """One prefill chunk and one decode step, as far as there is something to do."""
        try:
            self._round()
        except BaseException:  # an interrupt may have come between a step and the bookkeeping
            self._abandon()
            raise

    def _abandon(self) -> None:
        for slot in self.slots:
            if slot.request:
                slot.request.cancelled = True
                slot.request.stop_reason = "cancelled"
                slot.request = None
            self.forget(slot)

    def _round(self) -> None:
        self._clock += 1
        self._drop_cancelled()
        self._admit()
        prefilling = [slot for slot in self.slots if slot.request and not slot.request.prefilled]
        decoding = [slot for slot in self.slots if slot.request and slot.request.prefilled]
        began = time.perf_counter()
        if prefilling:
            self._prefill(min(prefilling, key=lambda slot: slot.used))
        if decoding:
            self._decode(decoding, began)
        self._release_finished()

    def take_free_slot(self) -> Slot:
        """An emptied slot for a call of its own; runs rounds until one is free."""
        while all(slot.request for slot in self.slots):
            self.round()
        slot = min(
            (slot for slot in self.slots if not slot.request), key=lambda s: (len(s.tokens) > 0, s.used)
        )
        self._set_length(slot, 0)
        return slot

    def forget(self, slot: Slot) -> None:
        """Empties a slot whose cache may no longer match its tokens."""
        self._set_length(slot, 0)

    def _set_length(self, slot: Slot, length: int) -> None:
        del slot.tokens[length:]
        self.backend.set_length(slot.index, length)

    def _drop_cancelled(self) -> None:
        for request in [r for r in self._waiting if r.cancelled]:
            self._waiting.remove(request)
            request.finish("cancelled")
        for slot in self.slots:
            if slot.request and slot.request.cancelled:
                slot.request.finish("cancelled")
        self._release_finished()

    def _release_finished(self) -> None:
        for slot in self.slots:
            if slot.request and slot.request.stop_reason:
                slot.request = None

    def _admit(self) -> None:
        while self._waiting and not all(slot.request for slot in self.slots):
            request = self._waiting.popleft()
            slot, kept = self._best_slot(request)
            self._set_length(slot, kept)
            slot.request, slot.used = request, self._clock
            self._clock += 1  # slots admitted in one round keep their order
            request.statistics.cached_tokens = kept

    def _best_slot(self, request: Request) -> tuple[Slot, int]:
        """The free slot that keeps most of the prompt; then an empty one; then the one unused for longest."""
        free = [(slot, self._reusable(slot, request.prompt)) for slot in self.slots if not slot.request]
        return max(free, key=lambda pair: (pair[1], not pair[0].tokens, -pair[0].used))

    def _reusable(self, slot: Slot, prompt: list[int]) -> int:
        """How many cached tokens can stay: the common prefix, but one token must be left to run."""
        shared = min(common_prefix(slot.tokens, prompt), len(prompt) - 1)
        if self.backend.recurrent and shared < len(slot.tokens):
            return 0  # a recurrent state knows no way back
        return shared if can_roll_back(self._layouts, len(slot.tokens), shared) else 0

    def _prefill(self, slot: Slot) -> None:
        request = slot.request
        chunk = request.prompt[len(slot.tokens) :][:PREFILL_CHUNK]
        began = time.perf_counter()
        try:
            logits = self._feed([slot], [chunk])
            if len(slot.tokens) == len(request.prompt):
                self._accept(slot, logits[0])
        except MoecError as error:
            self._fail(slot, error)
        request.statistics.prefill_seconds += time.perf_counter() - began

    def _decode(self, slots: list[Slot], began: float) -> None:
        chunks = [[slot.request.choices[-1].token] for slot in slots]
        try:
            logits = self._feed(slots, chunks)
        except MoecError as error:
            self._decode_apart(slots, began, error)
            return
        for slot, row in zip(slots, logits, strict=True):
            self._try_accept(slot, row)
            self._record(slot, began)

    def _decode_apart(self, slots: list[Slot], began: float, error: MoecError) -> None:
        """After a failed step: a request must not fall with its neighbour, so each runs alone.

        Repeating is harmless: a step writes the same rows again until the length moves on.
        """
        if len(slots) == 1:
            self._fail(slots[0], error)
            return
        for slot in slots:
            self._decode([slot], began)

    def _feed(self, slots: list[Slot], chunks: list[list[int]]) -> np.ndarray:
        """Runs one chunk of tokens in each slot (equally long ones): logits `[b,V]`."""
        counts = [len(chunk) for chunk in chunks]
        logits = self.backend.step(np.array(chunks, np.int32), [slot.index for slot in slots], counts)
        for slot, chunk in zip(slots, chunks, strict=True):
            slot.tokens += chunk
        return logits

    def _try_accept(self, slot: Slot, logits: np.ndarray) -> None:
        try:
            self._accept(slot, logits)
        except MoecError as error:
            self._fail(slot, error)

    def _accept(self, slot: Slot, logits: np.ndarray) -> None:
        room = len(slot.tokens) < self.backend.context
        slot.request.accept(slot.request.sampler(logits), room)

    def _record(self, slot: Slot, began: float) -> None:
        slot.request.statistics.decode_seconds.append(time.perf_counter() - began)

    def _fail(self, slot: Slot, error: MoecError) -> None:
        slot.request.fail(error)
        self.forget(slot)
