"""XXH64 checksums of files in 64 MiB chunks, so that damage is found at disk speed and can be located."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import xxhash

from moec.errors import MoecError

CHUNK = 64 << 20


@dataclass(frozen=True)
class FileRecord:
    """What the manifest says about one file.

    Attributes:
        bytes: Size of the whole file.
        checked_bytes: How much of its beginning the checksums cover. Everything, except for
            `experts.moex`, whose header and hash table are covered here and whose experts have their
            own checksums in that table, checked at first use.
        xxh64: One XXH64 (seed 0, 16 hex digits) per 64 MiB chunk of the covered part.
    """

    bytes: int
    checked_bytes: int
    xxh64: tuple[str, ...]

    @classmethod
    def of(cls, path: Path, checked_bytes: int | None = None) -> FileRecord:
        """Read a file and describe it."""
        size = path.stat().st_size
        covered = size if checked_bytes is None else min(checked_bytes, size)
        return cls(size, covered, tuple(_chunk_hashes(path, covered)))

    @classmethod
    def from_json(cls, tree: dict[str, Any]) -> FileRecord:
        return cls(int(tree["bytes"]), int(tree["checked_bytes"]), tuple(tree["xxh64"]))

    def verify(self, path: Path) -> None:
        """Compare with the file on disk.

        Raises:
            MoecError: the file is missing, has another size, or differs; says which part.
        """
        if not path.is_file():
            raise MoecError(f"{path.name} is missing from the bundle", where=str(path), hint=REBUILD)
        size = path.stat().st_size
        if size != self.bytes:
            what = f"{path.name} is damaged: it has {size} bytes, the manifest says {self.bytes}"
            raise MoecError(what, where=str(path), hint=REBUILD)
        for index, found in enumerate(_chunk_hashes(path, self.checked_bytes)):
            if index >= len(self.xxh64) or found != self.xxh64[index]:
                what = f"{path.name} is damaged: wrong checksum in bytes {_chunk_range(index, size)}"
                raise MoecError(what, where=str(path), hint=REBUILD)


REBUILD = "Copy the bundle again, or build it again with `moec build`."


def _chunk_range(index: int, size: int) -> str:
    return f"{index * CHUNK} to {min((index + 1) * CHUNK, size)}"


def _chunk_hashes(path: Path, covered: int):
    with path.open("rb", buffering=0) as file:
        buffer = memoryview(bytearray(min(CHUNK, max(covered, 1))))
        for start in range(0, covered, CHUNK):
            want = min(CHUNK, covered - start)
            _read_exactly(file, buffer[:want])
            yield xxhash.xxh64_hexdigest(buffer[:want])


def _read_exactly(file, view: memoryview) -> None:
    while view:
        count = file.readinto(view)
        if not count:
            raise MoecError("A file became shorter while it was read", where=str(file.name), hint=REBUILD)
        view = view[count:]
