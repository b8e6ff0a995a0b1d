"""Finds and loads the compiled libraries by ctypes: ONNX Runtime operators, expert store, packers."""

from __future__ import annotations

import ctypes
import os
from functools import cache
from pathlib import Path

import ml_dtypes
import numpy as np

import moec
from moec.errors import MoecError

_HINT = "reinstall moec, or: cmake -S plugins -B build/native -G Ninja && cmake --build build/native"


def find_library(name: str) -> Path | None:
    """Path of `libNAME.so` in $MOEC_NATIVE_DIR or in `_native/` of the package, or None.

    An editable installation has two such folders, of the installation and of the source tree: the newer
    library is the one that was built last.
    """
    file = f"lib{name}.so"
    override = os.environ.get("MOEC_NATIVE_DIR")
    if override and (Path(override) / file).is_file():
        return Path(override) / file
    found = [path for folder in moec.__path__ if (path := Path(folder) / "_native" / file).is_file()]
    return max(found, key=lambda path: path.stat().st_mtime, default=None)


def cpu_library() -> Path:
    """The library that `SessionOptions.register_custom_ops_library` takes.

    Raises:
        MoecError: it was not built.
    """
    path = find_library("moec_cpu")
    if path is None:
        raise MoecError("the native library libmoec_cpu.so is missing", hint=_HINT)
    return path


@cache
def _cpu() -> ctypes.CDLL:
    library = ctypes.CDLL(str(cpu_library()))
    pointer, u64, u32, i64 = ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_int64
    signatures = {
        "moec_cpu_isa": ([], ctypes.c_char_p),
        "moec_store_register": ([pointer, u64, u32, pointer, u32], None),
        "moec_store_unregister": ([pointer], None),
        "moec_xxh64": ([pointer, u64], u64),
        "moec_quantize_int4": ([pointer, pointer, i64, i64, pointer, pointer], ctypes.c_int),
        "moec_quantize_int8": ([pointer, pointer, i64, i64, pointer, pointer], ctypes.c_int),
        "moec_quantize_int4_bf16": ([pointer, pointer, i64, i64, pointer, pointer], ctypes.c_int),
        "moec_quantize_int8_bf16": ([pointer, pointer, i64, i64, pointer, pointer], ctypes.c_int),
    }
    for name, (arguments, result) in signatures.items():
        function = getattr(library, name)
        function.argtypes, function.restype = arguments, result
    return library


def cpu_isa() -> str:
    """Kernels in use: portable, avx2 or avx512 ($MOEC_CPU_ISA forces one).

    Raises:
        MoecError: $MOEC_CPU_ISA names one that does not exist or that this CPU cannot run.
    """
    name = _cpu().moec_cpu_isa()
    if name is None:
        raise MoecError(f"this CPU cannot run MOEC_CPU_ISA={os.environ.get('MOEC_CPU_ISA')}")
    return name.decode()


def xxh64(data: np.ndarray) -> int:
    """XXH64 (seed 0) of a contiguous array's bytes."""
    data = np.ascontiguousarray(data)
    return _cpu().moec_xxh64(data.ctypes.data, data.nbytes)


def register_store(blobs: np.ndarray, hashes: np.ndarray, layer: int) -> int:
    """Has the CPU operators check each expert of a layer against its XXH64 when they first use it.

    Args:
        blobs: int8 or uint8 `[E, blob_bytes]`, contiguous, usually mapped; the session must use this
            very memory.
        hashes: uint64 `[E]`.
        layer: For the message.

    Returns:
        The address of the blobs, for `unregister_store`.
    """
    hashes = np.ascontiguousarray(hashes, np.uint64)
    if not blobs.flags.c_contiguous or hashes.shape != blobs.shape[:1]:
        raise MoecError("expert blobs must be contiguous, with one hash for each", where=f"layer {layer}")
    address = blobs.ctypes.data
    _cpu().moec_store_register(address, blobs.shape[1], len(blobs), hashes.ctypes.data, layer)
    return address


def unregister_store(address: int) -> None:
    """Forgets a store, before its memory is unmapped."""
    _cpu().moec_store_unregister(address)


def _quantize(
    function: str, weight: np.ndarray, importance: np.ndarray | None, bytes_per_group: int
) -> tuple[np.ndarray, np.ndarray]:
    function += "_bf16" if weight.dtype == ml_dtypes.bfloat16 else ""
    weight = np.ascontiguousarray(weight, None if function.endswith("_bf16") else np.float32)
    refusal = MoecError(f"cannot quantize a weight of shape {weight.shape}: it must be 2-D and finite")
    if weight.ndim != 2:
        raise refusal
    rows, columns = weight.shape
    counts = np.ascontiguousarray(importance, np.float32) if importance is not None else None
    if counts is not None and counts.shape != (columns,):
        raise MoecError(f"importance has shape {counts.shape}, expected ({columns},)")
    groups = -(-columns // 64)
    codes = np.empty((rows, groups * bytes_per_group), np.uint8)
    scales = np.empty((rows, groups), np.float16)
    places = (array.ctypes.data for array in (codes, scales))
    address = counts.ctypes.data if counts is not None else None
    if getattr(_cpu(), function)(weight.ctypes.data, address, rows, columns, *places):
        raise refusal
    return codes, scales


def quantize_int4(weight: np.ndarray, importance: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """`moec.reference.weights.quantize_int4` in native code (one thread, without the GIL): same bytes."""
    return _quantize("moec_quantize_int4", weight, importance, 32)


def quantize_int8(weight: np.ndarray, importance: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """`moec.reference.weights.quantize_int8` in native code (one thread, without the GIL): same bytes."""
    return _quantize("moec_quantize_int8", weight, importance, 64)
