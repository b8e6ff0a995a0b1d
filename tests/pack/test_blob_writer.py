"""Blobs arrive whole, at their places, hashed; a failing write is raised where the caller sees it."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
import xxhash

from moec.pack.blob_writer import BlobWriter, one_torch_thread
from tests.helpers.rng import fresh_rng


def test_blobs_and_hashes_in_order():
    rng, seen = fresh_rng(), []
    blobs = [rng.integers(0, 256, int(rng.integers(1, 5000)), np.uint8) for _ in range(20)]
    file = io.BytesIO()
    with BlobWriter(file, seen.append) as writer:
        for index, blob in enumerate(blobs):
            writer.write(8192 * index, blob)
    data = file.getvalue()
    for index, blob in enumerate(blobs):
        assert data[8192 * index :][: blob.size] == blob.tobytes()
    assert writer.hashes == [xxhash.xxh64_intdigest(blob.tobytes()) for blob in blobs]
    assert seen == [blob.size for blob in blobs]


class FullDisk(io.BytesIO):
    def write(self, data) -> int:
        if self.tell() >= 300:
            raise OSError(28, "No space left on device")
        return super().write(data)


def _write(file: io.BytesIO, blobs: int, then: type[Exception] | None = None) -> None:
    with BlobWriter(file) as writer:
        for index in range(blobs):
            writer.write(100 * index, np.zeros(100, np.uint8))
        if then is not None:
            raise then


@pytest.mark.parametrize("blobs", [4, 40])  # found out at the end, and while writing
def test_a_failing_write_is_raised(blobs):
    with pytest.raises(OSError, match="No space"):
        _write(FullDisk(), blobs)


def test_an_error_of_the_caller_goes_first():
    with pytest.raises(KeyError):
        _write(FullDisk(), 4, then=KeyError)


def _fail_on_one_thread() -> None:
    with one_torch_thread():
        assert torch.get_num_threads() == 1
        raise KeyError


def test_torch_gets_its_threads_back():
    before = torch.get_num_threads()
    with pytest.raises(KeyError):
        _fail_on_one_thread()
    assert torch.get_num_threads() == before
