"""Where the weights are in `weights.safetensors`: names, types and byte offsets, without reading the data."""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from pathlib import Path

from moec.errors import MoecError


@dataclass(frozen=True)
class StoredTensor:
    """One tensor of a safetensors file.

    Attributes:
        name: Name in the file: a parameter's, or `NAME.codes` / `NAME.scales`.
        dtype: safetensors' spelling: U8, F16, BF16, F32.
        shape: As in the file; codes are bytes, `[N, ceil(K/64)*32]` for int4, `[N, ceil(K/64)*64]` for int8.
        offset, nbytes: The bytes in the file.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def stored_tensors(path: Path) -> dict[str, StoredTensor]:
    """Every tensor of a safetensors file, by name.

    Raises:
        MoecError: the file is missing or has no valid header.
    """
    try:
        with path.open("rb") as file:
            (size,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(size))
    except (OSError, struct.error, ValueError) as error:
        raise MoecError("the weights file cannot be read", where=str(path), hint=str(error)) from error
    return {name: _tensor(name, entry, 8 + size) for name, entry in header.items() if name != "__metadata__"}


def _tensor(name: str, entry: dict, base: int) -> StoredTensor:
    begin, end = entry["data_offsets"]
    return StoredTensor(name, entry["dtype"], tuple(entry["shape"]), base + begin, end - begin)
