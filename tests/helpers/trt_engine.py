"""Lowers and builds the synthetic graph of trt_graph.py, once for all tests that only look at the result."""

from __future__ import annotations

import tempfile
from functools import cache
from math import prod
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest

from moec.compile.compiler import compile_engine
from moec.compile.lowering import Lowered, lower
from moec.compile.plugins import find_plugin_library
from moec.compile.report import EngineReport
from moec.compile.stored import StoredTensor
from moec.compile.targets import RTX_TARGETS, has_module
from tests.helpers.trt_graph import BATCH, rewritten

CHUNK = 16
_FOLDER = tempfile.TemporaryDirectory(prefix="moec-test-engine-")


def need_tensorrt() -> Path:
    """The plugin library; skips the test where it or TensorRT-RTX is missing."""
    library = find_plugin_library()
    if library is None or not has_module("tensorrt_rtx"):
        pytest.skip("needs tensorrt-rtx and libmoec_trt.so (nvcc)")
    return library


def stored_for(model: onnx.ModelProto, weights: str = "int4") -> dict[str, StoredTensor]:
    """What weights.safetensors would hold: int4 dense, int8 embeddings, fp32 routers and norms."""
    stored: dict[str, StoredTensor] = {}
    offset = 4096
    for tensor in model.graph.initializer:
        if not tensor.name.endswith(".weight"):
            continue
        for entry in _entries(tensor.name, tuple(tensor.dims), weights):
            stored[entry.name] = StoredTensor(entry.name, entry.dtype, entry.shape, offset, entry.nbytes)
            offset += entry.nbytes
    return stored


def _entries(name: str, shape: tuple[int, ...], weights: str) -> list[StoredTensor]:
    if len(shape) == 2 and "gate" not in name and weights == "int4":
        groups = -(-shape[1] // 64)
        width = groups * (64 if "embed" in name else 32)
        codes = StoredTensor(f"{name}.codes", "U8", (shape[0], width), 0, shape[0] * width)
        return [codes, StoredTensor(f"{name}.scales", "F16", (shape[0], groups), 0, shape[0] * groups * 2)]
    dtype, size = ("F32", 4) if len(shape) == 1 or "gate" in name else ("BF16", 2)
    return [StoredTensor(name, dtype, shape, 0, size * prod(shape))]


def lowered(dtype: str = "fp16", weights: str = "int4", **graph) -> Lowered:
    """The synthetic graph, lowered."""
    model = rewritten(**graph)
    return lower(ir.from_proto(model), stored_for(model, weights), dtype)


@cache
def lowered_file(
    dtype: str = "fp16", weights: str = "int4", kv_format: str = "mkv2", window: int = 0
) -> Path:
    """Path of the lowered graph; do not write to it."""
    path = Path(_FOLDER.name) / f"{dtype}-{weights}-{kv_format}-{window}.onnx"
    lowered(dtype, weights, kv_format=kv_format, window=window).save(path)
    return path


@cache
def engine(dtype: str = "fp16", weights: str = "int4", kv_format: str = "mkv2", window: int = 0):
    """(report, path of the plan) of the synthetic graph; the plan must not be changed."""
    library = need_tensorrt()
    graph = lowered_file(dtype, weights, kv_format, window)
    plan = graph.with_suffix(".plan")
    report: EngineReport = compile_engine(graph, RTX_TARGETS, plan, batch=BATCH, chunk=CHUNK, library=library)
    return report, plan
