"""Writes `exported.onnx` with its fp32 weights beside it, so that stock ONNX Runtime runs it."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx_ir as ir

from moec.checkpoint import Checkpoint
from moec.frontend.capture import Captured

_ALIGN = 64


def save_exported(captured: Captured, ckpt: Checkpoint, path: str | os.PathLike[str]) -> None:
    """Saves the graph at `path` and its fp32 weights at `path` + ".data", one expert in memory at a time.

    Args:
        captured: From `capture`; left as it was.
        ckpt: The checkpoint that the weights are read from.
        path: The .onnx file; both files are overwritten.
    """
    path = Path(path)
    data = path.with_name(path.name + ".data")
    empty = [v for v in captured.model.graph.initializers.values() if v.const_value is None]
    with data.open("wb") as f:
        table = {v.name: _write(f, ckpt, v) for v in empty}
    with bound(captured.model, table, data.name):
        ir.save(captured.model, path)


@contextlib.contextmanager
def bound(model: ir.Model, table: dict[str, tuple[int, int]], location: str) -> Iterator[None]:
    """Gives initializers without data external data while the context is open.

    Args:
        model: The graph.
        table: Initializer name -> (offset, bytes) in the file `location`.
        location: File name beside the .onnx file.
    """
    values = [model.graph.initializers[name] for name in table]
    for v in values:
        offset, length = table[v.name]
        v.const_value = ir.ExternalTensor(location, offset, length, v.dtype, shape=v.shape, name=v.name)
    try:
        yield
    finally:
        for v in values:
            v.const_value = None


def _write(f, ckpt: Checkpoint, value: ir.Value) -> tuple[int, int]:
    f.write(b"\0" * (-f.tell() % _ALIGN))
    start = f.tell()
    for part in _parts(ckpt, value):
        f.write(np.ascontiguousarray(part, dtype=value.dtype.numpy()).data)
    return start, f.tell() - start


def _parts(ckpt: Checkpoint, value: ir.Value) -> Iterator[np.ndarray]:
    shape = ckpt.shape(value.name)
    if len(shape) == 3:  # stacked experts
        yield from (ckpt.expert(value.name, e) for e in range(shape[0]))
    else:
        yield ckpt.param(value.name)
