"""What a binding table means in memory: buffers, their first contents, and which tensors share one."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import ml_dtypes
import numpy as np

from moec.compile.memory_plan import EngineBinding
from moec.compile.places import CALIBRATION, WEIGHTS
from moec.compile.stored import stored_tensors

_STORED = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "U8": np.dtype(np.uint8),
    "I8": np.dtype(np.int8),
    "I32": np.dtype(np.int32),
}
FILLED = ("weights", "store", "calibration")


def dtype_of(binding: EngineBinding) -> np.dtype:
    """The NumPy type of a binding's elements."""
    return np.dtype(ml_dtypes.bfloat16) if binding.dtype == "bfloat16" else np.dtype(binding.dtype)


def owners(table: Iterable[EngineBinding]) -> dict[str, str]:
    """The tensor whose buffer each tensor uses: itself, or the input that an output aliases."""
    return {binding.name: binding.alias_of or binding.name for binding in table}


def buffer_bytes(table: Iterable[EngineBinding]) -> dict[str, int]:
    """Bytes of every buffer, by the tensor that owns it; an aliased output has none of its own.

    Raises:
        ValueError: an output aliases an input of another size, or none.
    """
    table = list(table)
    sizes = {binding.name: binding.nbytes for binding in table if binding.alias_of is None}
    for binding in table:
        if binding.alias_of is not None and sizes.get(binding.alias_of) != binding.nbytes:
            raise ValueError(f"{binding.name} cannot share the memory of {binding.alias_of}")
    return sizes


def exchanged(table: Iterable[EngineBinding]) -> list[tuple[str, str]]:
    """(input, output) of the states with two buffers, which change places after every step."""
    return [
        (binding.name.removesuffix(".out"), binding.name)
        for binding in table
        if binding.source == "cache" and binding.alias_of is None and binding.name.endswith(".out")
    ]


def contents(folder: Path, table: Iterable[EngineBinding]) -> Iterator[tuple[str, np.ndarray]]:
    """(name, array) of every buffer that a file of the bundle fills, as the engine wants its elements.

    Raises:
        ValueError: a file's bytes are not the tensor's.
    """
    stored = {
        (name, tensor.offset): _STORED[tensor.dtype]
        for name in (WEIGHTS, CALIBRATION)
        for tensor in stored_tensors(folder / name).values()
    }
    for binding in table:
        if binding.source in FILLED:
            yield binding.name, _content(folder, binding, stored)


def _content(folder: Path, binding: EngineBinding, stored: Mapping[tuple[str, int], np.dtype]) -> np.ndarray:
    place, dtype = binding.place, dtype_of(binding)
    assert place is not None, binding.name
    data = np.fromfile(folder / place.file, np.uint8, place.nbytes, offset=place.offset)
    if binding.transform == "cast":
        data = data.view(stored[place.file, place.offset]).astype(dtype)
    if data.nbytes != binding.nbytes:
        raise ValueError(f"{binding.name}: {data.nbytes} bytes for {binding.nbytes}")
    return data.view(dtype).reshape(binding.shapes[0])
