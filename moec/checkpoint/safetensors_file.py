"""Read-only view of one safetensors file: header checked against the file size, data mapped and never copied.

Format: u64 header length, JSON header {name: {dtype, shape, data_offsets}}, data
(https://huggingface.co/docs/safetensors).
"""

from __future__ import annotations

import json
import math
import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

from moec.errors import MoecError

DTYPES: dict[str, np.dtype] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
    "F8_E4M3": np.dtype(ml_dtypes.float8_e4m3fn),
    "F8_E5M2": np.dtype(ml_dtypes.float8_e5m2),
    "F8_E8M0": np.dtype(ml_dtypes.float8_e8m0fnu),
    "I64": np.dtype(np.int64),
    "I32": np.dtype(np.int32),
    "I16": np.dtype(np.int16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "BOOL": np.dtype(np.bool_),
}
_MAX_HEADER = 100 << 20  # the same bound as the reference implementation
_BROKEN = "The download was probably cut off: fetch the file again."


@dataclass(frozen=True)
class TensorInfo:
    """Where a tensor lies: `offset` and `nbytes` are bytes from the start of the file."""

    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int
    nbytes: int


class SafetensorsFile:
    """One mapped file; `tensors` maps names to their place, `view(name)` gives a read-only array.

    Raises:
        MoecError: The file is missing, truncated, or its header is not a safetensors header.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.tensors = _read_header(self.path)
        self._data: np.ndarray | None = None
        self._map: mmap.mmap | None = None

    def view(self, name: str) -> np.ndarray:
        """The tensor `name` in its own dtype (bf16 as ml_dtypes.bfloat16), mapped, read-only."""
        info = self.tensors[name]
        if self._data is None:
            with self.path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._data = np.frombuffer(self._map, np.uint8)
        raw = self._data[info.offset : info.offset + info.nbytes]
        if info.offset % info.dtype.itemsize:  # legal in the format, but NumPy would read it slowly
            raw = raw.copy()
        return raw.view(info.dtype).reshape(info.shape)

    def release(self) -> None:
        """Gives the pages that were read back to the system; views stay valid and read them again."""
        if self._map is not None:
            self._map.madvise(mmap.MADV_DONTNEED)


def _read_header(path: Path) -> dict[str, TensorInfo]:
    try:
        size = path.stat().st_size
        with path.open("rb") as f:
            length = int.from_bytes(f.read(8), "little")
            if size < 8 or not 2 <= length <= _MAX_HEADER:
                raise MoecError("this is not a safetensors file", where=str(path), hint=_BROKEN)
            if 8 + length > size:
                raise MoecError(
                    "the safetensors file is truncated in its header", where=str(path), hint=_BROKEN
                )
            text = f.read(length)
    except OSError as e:
        raise MoecError(f"cannot read the weights: {e.strerror}", where=str(path)) from e
    try:
        header: dict[str, Any] = json.loads(text)
        entries = {k: _entry(k, v, 8 + length) for k, v in header.items() if k != "__metadata__"}
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise MoecError("the header of the safetensors file is corrupt", where=str(path), hint=_BROKEN) from e
    end = max((t.offset + t.nbytes for t in entries.values()), default=0)
    if end > size:
        raise MoecError(
            f"the safetensors file is truncated: {size} of {end} bytes", where=str(path), hint=_BROKEN
        )
    return entries


def _entry(name: str, value: dict[str, Any], base: int) -> TensorInfo:
    dtype, shape = DTYPES[value["dtype"]], tuple(int(d) for d in value["shape"])
    start, stop = value["data_offsets"]
    if start < 0 or stop - start != math.prod(shape) * dtype.itemsize:
        raise ValueError(f"{name}: {stop - start} bytes for shape {shape}")
    return TensorInfo(dtype, shape, base + start, stop - start)
