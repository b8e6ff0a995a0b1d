"""What this machine has for running on a GPU; found without importing or loading anything heavy."""

from __future__ import annotations

import ctypes
import importlib.util
import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from moec.errors import MoecError

DRIVER_HINT = (
    "an NVIDIA driver (libcuda.so.1): install it on the host; in a container, start it with GPU access"
)
_NVCC_DEFAULT = Path("/usr/local/cuda/bin/nvcc")


def driver_version() -> str | None:
    """The CUDA version that the installed driver supports, e.g. "13.0"; None without a driver."""
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    version = ctypes.c_int()
    if cuda.cuDriverGetVersion(ctypes.byref(version)) != 0:
        return None
    return f"{version.value // 1000}.{version.value % 1000 // 10}"


def gpu_names() -> list[str]:
    """Name, compute capability and memory of each GPU, as nvidia-smi prints them; empty without one."""
    command = ["nvidia-smi", "--query-gpu=name,compute_cap,memory.total", "--format=csv,noheader"]
    try:
        result = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [line.strip() for line in result.stdout.splitlines() if line.strip()]


def find_nvcc() -> Path | None:
    """The CUDA compiler: $CUDACXX, $PATH, or the toolkit's default place."""
    found = os.environ.get("CUDACXX") or shutil.which("nvcc")
    if found:
        return Path(found)
    return _NVCC_DEFAULT if _NVCC_DEFAULT.is_file() else None


def has_module(name: str) -> bool:
    """Whether a Python module is installed (it is not imported)."""
    try:
        return importlib.util.find_spec(name) is not None
    except (ImportError, ValueError):
        return False


def missing_for_tensorrt() -> list[str]:
    """What this machine lacks to run a TensorRT engine, each with how to get it."""
    missing = []
    if driver_version() is None:
        missing.append(DRIVER_HINT)
    elif not gpu_names():
        missing.append("a GPU: the driver is there, but nvidia-smi lists none")
    if not (has_module("tensorrt_rtx") or has_module("tensorrt")):
        missing.append("TensorRT-RTX: pip install tensorrt-rtx")
    if not has_module("cuda.bindings"):
        missing.append("cuda-python: pip install 'moec[gpu]'")
    return missing


def no_tensorrt(engines: Sequence[Mapping[str, Any]]) -> MoecError:
    """The error of `device="tensorrt"`; `engines` are the records in the bundle's manifest."""
    missing = missing_for_tensorrt()
    if not engines:
        missing.append("an engine in the bundle: build it with `moec build --target auto`")
    elif driver_version() is not None and gpu_names():
        missing += _misfits(engines)
    missing.append("moec's TensorRT runtime: this version builds engines and does not run them yet")
    listed = "".join(f"\n  - {entry}" for entry in missing)
    return MoecError(
        f"The bundle cannot run on TensorRT here, missing:{listed}", hint="--device cpu runs it on the CPU"
    )


def _misfits(engines: Sequence[Mapping[str, Any]]) -> list[str]:
    """Why no engine fits a GPU of this machine; empty if one does."""
    from moec.compile.requirements import misfits

    reasons = [misfits(engine["targets"], engine["memory"]["total"]) for engine in engines]
    return [] if [] in reasons else [reason for found in reasons for reason in found]
