"""The file experts.moex: header, hash table, layers of contiguous blobs (all little endian)."""

from __future__ import annotations

import json
import struct
from dataclasses import asdict, dataclass

import numpy as np

from moec.errors import MoecError

MAGIC, VERSION = b"MOEX", 1
PAGE, LAYER_ALIGN = 4096, 2 * 1024 * 1024
_FIXED = struct.Struct("<4sIQQ")  # magic, version, header_bytes, json_bytes


def _align(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class StoreLayer:
    """Experts of a layer: expert e is at `offset + e*blob_bytes` of the file."""

    layer: int
    num_experts: int
    blob_bytes: int
    offset: int

    @property
    def end(self) -> int:
        return self.offset + self.num_experts * self.blob_bytes


@dataclass(frozen=True)
class StoreHeader:
    """What the first bytes of a store say. The hash table (uint64 XXH64 of each blob, seed 0) follows."""

    format: str
    group_size: int
    layers: tuple[StoreLayer, ...]
    header_bytes: int

    @property
    def num_experts(self) -> int:
        """Entries of the hash table."""
        return sum(layer.num_experts for layer in self.layers)

    @property
    def file_bytes(self) -> int:
        return self.layers[-1].end if self.layers else _align(self.header_bytes + 8 * self.num_experts, PAGE)

    def hash_index(self, layer: int) -> int:
        """First entry of a layer in the hash table."""
        before = 0
        for entry in self.layers:
            if entry.layer == layer:
                return before
            before += entry.num_experts
        raise MoecError(f"the expert store has no layer {layer}")

    @classmethod
    def plan(cls, format: str, group_size: int, layers: list[tuple[int, int, int]]) -> StoreHeader:
        """Places layers, given as (layer, num_experts, blob_bytes) in order."""
        header_bytes = PAGE
        while True:
            header = cls._place(format, group_size, layers, header_bytes)
            needed = _align(_FIXED.size + len(header._json()), PAGE)
            if needed <= header_bytes:
                return header
            header_bytes = needed

    @classmethod
    def _place(cls, format: str, group_size: int, layers: list, header_bytes: int) -> StoreHeader:
        offset = _align(header_bytes + 8 * sum(count for _, count, _ in layers), PAGE)
        placed = []
        for layer, count, blob_bytes in layers:
            entry = StoreLayer(layer, count, blob_bytes, _align(offset, LAYER_ALIGN))
            placed.append(entry)
            offset = entry.end
        return cls(format, group_size, tuple(placed), header_bytes)

    def _json(self) -> bytes:
        layers = [asdict(layer) for layer in self.layers]
        return json.dumps({"format": self.format, "group_size": self.group_size, "layers": layers}).encode()

    def pack(self) -> bytes:
        """The header's bytes, `header_bytes` long."""
        text = self._json()
        fixed = _FIXED.pack(MAGIC, VERSION, self.header_bytes, len(text))
        return (fixed + text).ljust(self.header_bytes, b"\0")

    @classmethod
    def parse(cls, data: bytes | memoryview, where: str = "experts.moex") -> StoreHeader:
        """Reads a header from the start of a store.

        Raises:
            MoecError: not a store, a newer version, or damaged.
        """
        if len(data) < _FIXED.size or bytes(data[:4]) != MAGIC:
            raise MoecError("not an expert store", where=where)
        _, version, header_bytes, json_bytes = _FIXED.unpack_from(data)
        if version != VERSION:
            raise MoecError(
                f"expert store version {version} is not supported", where=where, hint="update moec"
            )
        try:
            fields = json.loads(bytes(data[_FIXED.size : _FIXED.size + json_bytes]))
            layers = tuple(StoreLayer(**layer) for layer in fields["layers"])
            return cls(fields["format"], fields["group_size"], layers, header_bytes)
        except (ValueError, KeyError, TypeError) as error:
            raise MoecError("the header of the expert store is damaged", where=where) from error

    def hashes(self, data: np.ndarray) -> np.ndarray:
        """The hash table, uint64 `[num_experts]`, of a store given as uint8 `[file_bytes]`."""
        start = self.header_bytes
        return np.asarray(data[start : start + 8 * self.num_experts]).view("<u8")
