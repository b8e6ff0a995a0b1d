"""Finds the compiled plugin library, libmoec_trt.so."""

from __future__ import annotations

import os
from pathlib import Path

import moec
from moec.errors import MoecError

LIBRARY = "libmoec_trt.so"
HINT = (
    "It is built where nvcc is found: install the CUDA toolkit, or pip install nvidia-cuda-nvcc "
    "nvidia-cuda-runtime nvidia-cuda-crt nvidia-nvvm, then reinstall moec. Or build with --target cpu."
)


def find_plugin_library() -> Path | None:
    """The library in $MOEC_NATIVE_DIR or a `_native` folder of the package; None where it was not built."""
    folders = [Path(os.environ["MOEC_NATIVE_DIR"])] if "MOEC_NATIVE_DIR" in os.environ else []
    folders += [Path(entry) / "_native" for entry in moec.__path__]
    return next((folder / LIBRARY for folder in folders if (folder / LIBRARY).is_file()), None)


def plugin_library() -> Path:
    """As `find_plugin_library`.

    Raises:
        MoecError: it was not built.
    """
    found = find_plugin_library()
    if found is None:
        raise MoecError(f"the TensorRT plugin library {LIBRARY} is not built", hint=HINT)
    return found
