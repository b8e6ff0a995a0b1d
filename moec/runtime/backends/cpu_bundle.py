"""A CPU backend for a bundle: its graph, calibration tensors, mapped expert store and libmoec_cpu."""

from __future__ import annotations

import weakref

from safetensors.numpy import load_file

from moec.bundle.reader import Bundle
from moec.native import cpu_library, register_store, unregister_store
from moec.pack.experts_store import open_experts
from moec.runtime.backends.cpu import CpuBackend

GRAPH, CALIBRATION, EXPERTS = "model.onnx", "calibration.safetensors", "experts.moex"


def open_cpu_backend(bundle: Bundle, threads: int | None = None) -> CpuBackend:
    """Loads the bundle's graph; expert weights stay in the file until they are used.

    Raises:
        MoecError: A missing library, a graph that does not load, or a store that does not fit it.
    """
    library = cpu_library()
    store = open_experts(bundle.file(EXPERTS))
    experts = {entry.layer: store.layer(entry.layer) for entry in store.header.layers}
    constants = load_file(bundle.file(CALIBRATION))
    constants |= {f"moe.{layer}.experts": blobs for layer, blobs in experts.items()}
    context = bundle.manifest.context
    backend = CpuBackend(bundle.file(GRAPH), constants, context=context, library=library, threads=threads)
    for layer, blobs in experts.items():  # the operators check an expert when they first use it
        address = register_store(blobs, store.hashes(layer), layer)
        weakref.finalize(backend, unregister_store, address)
    return backend
