"""Chunked checksums agree with hashing the bytes directly and say where damage is."""

from __future__ import annotations

import random

import pytest
import xxhash

from moec.bundle import checksums
from moec.bundle.checksums import FileRecord
from moec.errors import MoecError


def test_chunks_are_hashed_one_by_one(tmp_path, monkeypatch):
    monkeypatch.setattr(checksums, "CHUNK", 1000)
    data = random.randbytes(2500)
    (tmp_path / "f").write_bytes(data)
    record = FileRecord.of(tmp_path / "f")
    parts = [data[:1000], data[1000:2000], data[2000:]]
    assert record == FileRecord(2500, 2500, tuple(xxhash.xxh64(p, seed=0).hexdigest() for p in parts))
    record.verify(tmp_path / "f")
    (tmp_path / "f").write_bytes(data[:1500] + bytes([data[1500] ^ 1]) + data[1501:])
    with pytest.raises(MoecError, match="in bytes 1000 to 2000"):
        record.verify(tmp_path / "f")


def test_an_empty_file_has_no_chunks(tmp_path):
    (tmp_path / "f").write_bytes(b"")
    assert FileRecord.of(tmp_path / "f") == FileRecord(0, 0, ())


def test_a_prefix_can_be_covered(tmp_path):
    data = random.randbytes(100)
    (tmp_path / "f").write_bytes(data)
    record = FileRecord.of(tmp_path / "f", 10)
    assert record.xxh64 == (xxhash.xxh64_hexdigest(data[:10]),)
    (tmp_path / "f").write_bytes(data[:10] + bytes(90))
    record.verify(tmp_path / "f")
