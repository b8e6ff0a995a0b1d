"""Hashes and writes blobs on a second thread while the first packs the next one."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from typing import BinaryIO, Self

import numpy as np
import xxhash

OnBytes = Callable[[int], None]
_PENDING = 2  # blobs in memory beside the one that is being packed


class BlobWriter:
    """Writes blobs in the order given; a context manager whose end waits for the last one.

    Args:
        file: Where to; nobody else may use it until the end.
        on_bytes: Called on the caller's thread with the bytes of each blob that was written.

    Attributes:
        hashes: XXH64 of each blob, complete after the end.

    Raises:
        OSError: by `write` or at the end, what a write before raised.
    """

    def __init__(self, file: BinaryIO, on_bytes: OnBytes | None = None) -> None:
        self.hashes: list[int] = []
        self._file, self._on_bytes = file, on_bytes or (lambda count: None)
        self._thread = ThreadPoolExecutor(1, "moec-write")
        self._pending: deque[Future[tuple[int, int]]] = deque()

    def write(self, offset: int, blob: np.ndarray) -> None:
        """Takes over a contiguous uint8 `[n]`, to be written at `offset` bytes of the file."""
        self._pending.append(self._thread.submit(self._write, offset, blob))
        self._collect(_PENDING)

    def _write(self, offset: int, blob: np.ndarray) -> tuple[int, int]:
        self._file.seek(offset)
        self._file.write(memoryview(blob))
        return xxhash.xxh64_intdigest(blob), blob.nbytes

    def _collect(self, keep: int) -> None:
        while len(self._pending) > keep:
            digest, count = self._pending.popleft().result()
            self.hashes.append(digest)
            self._on_bytes(count)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._collect(0)
        finally:
            self._thread.shutdown(cancel_futures=True)


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Lets torch copy with one thread: starting others for one expert costs more than it saves."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
