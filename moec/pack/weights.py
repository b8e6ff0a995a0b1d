"""`weights.safetensors`: dense weights, transformed and streamed tensor by tensor.

The file is ordinary safetensors (any reader opens it), deterministic, and every tensor starts at a multiple
of 64 bytes from the start of the file; the gaps are U8 tensors named `.pad.N`, because the format allows no
holes. A quantized parameter P is `P.codes` (U8) and `P.scales` (F16), laid out as `moec.reference.weights`
says; others keep their name as BF16 or F32.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np

from moec.bundle.writer import writing
from moec.checkpoint import Checkpoint
from moec.errors import MoecError
from moec.pack.quantizers import quantizer
from moec.reference.weights import GROUP_SIZE, num_groups

ALIGN = 64
_CHUNK_BYTES = 8 << 20
_PLAIN = {"bf16": np.dtype(ml_dtypes.bfloat16), "f32": np.dtype(np.float32)}
_CODE_BYTES = {"int4": GROUP_SIZE // 2, "int8": GROUP_SIZE}
TRANSFORMS = (*_CODE_BYTES, *_PLAIN)
_TAGS = {"uint8": "U8", "float16": "F16", "bfloat16": "BF16", "float32": "F32"}
OnBytes = Callable[[int], None]


@dataclass(frozen=True)
class TensorPlan:
    """One parameter and what becomes of it: `transform` is int4, int8 (2-D weights), bf16 or f32."""

    name: str
    transform: str


@dataclass(frozen=True)
class Entry:
    """One tensor of the file: `offset` and `nbytes` in bytes from the start of the file."""

    name: str
    dtype: np.dtype
    shape: tuple[int, ...]
    offset: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize


def entries_of(plan: TensorPlan, shape: Sequence[int]) -> list[Entry]:
    """The tensors that a parameter of `shape` becomes, not yet placed.

    Raises:
        MoecError: an unknown transform, or a quantization of something that is not a matrix.
    """
    shape = tuple(shape)
    if plan.transform in _PLAIN:
        return [Entry(plan.name, _PLAIN[plan.transform], shape)]
    if plan.transform not in _CODE_BYTES or len(shape) != 2:
        raise MoecError(f"{plan.name} of shape {list(shape)} cannot be stored as {plan.transform}")
    rows, groups = shape[0], num_groups(shape[1])
    codes = Entry(f"{plan.name}.codes", np.dtype(np.uint8), (rows, groups * _CODE_BYTES[plan.transform]))
    return [codes, Entry(f"{plan.name}.scales", np.dtype(np.float16), (rows, groups))]


@dataclass(frozen=True)
class WeightsFile:
    """The planned file: header bytes, then the entries of each plan, placed."""

    plans: tuple[TensorPlan, ...]
    entries: tuple[tuple[Entry, ...], ...]
    header: bytes

    @property
    def total_bytes(self) -> int:
        """Size of the finished file."""
        ends = [e.offset + e.nbytes for group in self.entries for e in group]
        return max(ends, default=len(self.header))

    def places(self) -> dict[str, tuple[int, int]]:
        """Tensor name -> (offset, length) in bytes."""
        return {e.name: (e.offset, e.nbytes) for group in self.entries for e in group}


def plan_weights(plans: Iterable[TensorPlan], shape_of: Callable[[str], Sequence[int]]) -> WeightsFile:
    """Place all tensors, in the order of the plans, without reading any weight."""
    plans = tuple(plans)
    groups = [entries_of(plan, shape_of(plan.name)) for plan in plans]
    flat = [entry for group in groups for entry in group]
    names = [entry.name for entry in flat]
    if len(set(names)) != len(names):
        raise MoecError(f"A tensor is packed twice: {max(names, key=names.count)}")
    header, starts = _header(flat)
    placed = iter(Entry(e.name, e.dtype, e.shape, start) for e, start in zip(flat, starts, strict=True))
    return WeightsFile(plans, tuple(tuple(next(placed) for _ in group) for group in groups), header)


def _header(entries: Sequence[Entry]) -> tuple[bytes, list[int]]:
    table, starts, position = {"__metadata__": {"format": "moec"}}, [], 0
    for index, entry in enumerate(entries):
        gap = -position % ALIGN
        if gap:
            table[f".pad.{index}"] = _record("U8", (gap,), position, gap)
        starts.append(position + gap)
        table[entry.name] = _record(_TAGS[entry.dtype.name], entry.shape, starts[-1], entry.nbytes)
        position = starts[-1] + entry.nbytes
    text = json.dumps(table, separators=(",", ":")).encode()
    text += b" " * (-(8 + len(text)) % ALIGN)
    header = len(text).to_bytes(8, "little") + text
    return header, [len(header) + start for start in starts]


def _record(tag: str, shape: Sequence[int], start: int, nbytes: int) -> dict:
    return {"dtype": tag, "shape": list(shape), "data_offsets": [start, start + nbytes]}


def write_weights(
    path: Path,
    plans: Iterable[TensorPlan],
    checkpoint: Checkpoint,
    on_bytes: OnBytes | None = None,
    importance: Mapping[str, np.ndarray] | None = None,
) -> dict[str, tuple[int, int]]:
    """Transform and write parameters; memory stays bounded by a few chunks of 8 MiB and one tensor's scales.

    Args:
        path: The file to make.
        plans: What to store, in this order.
        checkpoint: Where the parameters are read from.
        on_bytes: Called with the bytes of each chunk that was written.
        importance: By parameter, f32 `[K]`; see `moec.reference.weights.quantize_int4`.

    Returns:
        Tensor name -> (offset, length) in bytes from the start of the file.

    Raises:
        MoecError: a full disk, an impossible transform, weights to quantize that are not finite.
    """
    planned, importance = plan_weights(plans, checkpoint.shape), importance or {}
    with writing(path, planned.total_bytes), path.open("wb") as file:
        file.write(planned.header)
        for plan, entries in zip(planned.plans, planned.entries, strict=True):
            for part in _encoded(plan, entries, checkpoint.param(plan.name), importance.get(plan.name)):
                file.write(memoryview(part).cast("B"))
                if on_bytes is not None:
                    on_bytes(part.nbytes)
            _pad(file)
        file.truncate(planned.total_bytes)
    return planned.places()


def _encoded(
    plan: TensorPlan, entries: Sequence[Entry], weight: np.ndarray, importance: np.ndarray | None
) -> Iterator[np.ndarray]:
    """The data of the entries in file order, in pieces, as uint8 arrays."""
    if plan.transform in _PLAIN:
        for rows in _row_chunks(weight):
            yield _bytes_of(rows.astype(entries[0].dtype))
        return
    quantize, scales = quantizer(plan.transform), []
    for rows in _row_chunks(weight):
        try:
            codes, scale = quantize(rows, importance)
        except MoecError as error:
            raise MoecError(error.what, where=plan.name, hint=error.hint) from None
        scales.append(scale)
        yield _bytes_of(codes)
    yield np.zeros(-entries[0].nbytes % ALIGN, np.uint8)
    yield _bytes_of(np.concatenate(scales))


def _row_chunks(weight: np.ndarray) -> Iterator[np.ndarray]:
    if weight.ndim < 2:
        yield weight
        return
    row_bytes = 4 * math.prod(weight.shape[1:])
    step = max(1, _CHUNK_BYTES // max(row_bytes, 1))
    for start in range(0, weight.shape[0], step):
        yield weight[start : start + step]


def _bytes_of(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8)


def _pad(file: BinaryIO) -> None:
    file.write(bytes(-file.tell() % ALIGN))
