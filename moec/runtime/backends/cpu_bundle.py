"""A CPU backend for a bundle: its graph, calibration tensors, mapped expert store and libmoec_cpu."""

from __future__ import annotations

import ctypes
import weakref
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

from moec.bundle.reader import Bundle
from moec.native import cpu_library
from moec.pack.experts_store import ExpertStore, open_experts
from moec.runtime.backends.cpu import CpuBackend

GRAPH, CALIBRATION, EXPERTS = "model.onnx", "calibration.safetensors", "experts.moex"


def open_cpu_backend(bundle: Bundle, threads: int | None = None) -> CpuBackend:
    """Loads the bundle's graph; expert weights stay in the file until they are used.

    Raises:
        MoecError: A missing library, a graph that does not load, or a store that does not fit it.
    """
    library = cpu_library()
    store = open_experts(bundle.file(EXPERTS))
    layers = [entry.layer for entry in store.header.layers]
    experts = {f"moe.{layer}.experts": store.layer(layer) for layer in layers}
    constants = load_file(bundle.file(CALIBRATION)) | experts
    context = bundle.manifest.context
    backend = CpuBackend(bundle.file(GRAPH), constants, context=context, library=library, threads=threads)
    for layer in layers:
        _check_at_first_use(backend, library, store, layer)
    return backend


def _check_at_first_use(backend: CpuBackend, library: Path, store: ExpertStore, layer: int) -> None:
    """Tells the operators the checksums of a layer's experts, until the backend is gone."""
    native = ctypes.CDLL(str(library))
    blobs = store.layer(layer)
    hashes = np.ascontiguousarray(store.hashes(layer), np.uint64)  # copied by the library
    base = ctypes.c_void_p(blobs.ctypes.data)
    count, blob_bytes = blobs.shape
    native.moec_store_register(
        base,
        ctypes.c_uint64(blob_bytes),
        ctypes.c_uint32(count),
        hashes.ctypes.data_as(ctypes.POINTER(ctypes.c_uint64)),
        ctypes.c_uint32(layer),
    )
    weakref.finalize(backend, native.moec_store_unregister, base)
