"""Whether GPU tests can run here, and if not, why: asked of the driver, without any CUDA package."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence

from moec.compile.gpu import Gpu, driver, local_gpus
from moec.compile.targets import RTX_CAN, has_module


def why_no_gpu() -> str | None:
    """None where the driver lists a GPU that the kernels support."""
    if driver() is None:
        return "no NVIDIA driver (libcuda.so.1 does not load)"
    return unusable(local_gpus())


def unusable(gpus: Sequence[Gpu]) -> str | None:
    """Why the first of the driver's GPUs cannot run the kernels."""
    if not gpus:
        return "no GPU: the NVIDIA driver lists none"
    if _number(gpus[0].arch) < 80:
        return f"{gpus[0].name} is {gpus[0].arch}: the kernels need sm_80 or later"
    return None


def engine_module(arch: str) -> str | None:
    """The TensorRT module that builds engines for an architecture, if it is installed."""
    module = "tensorrt_rtx" if arch in RTX_CAN else "tensorrt"
    return module if has_module(module) else None


def why_no_engine(gpu: Gpu) -> str | None:
    """None where an engine for this GPU can be built and run here."""
    if engine_module(gpu.arch) is None:
        return _no_module(gpu)
    if not _has_cuda_python():
        return "no cuda-python: pip install 'moec[gpu]'"
    return None


def _no_module(gpu: Gpu) -> str:
    if gpu.arch in RTX_CAN:
        return f"{gpu.name} ({gpu.arch}) needs TensorRT-RTX, which is not installed"
    can = ", ".join(RTX_CAN)
    return f"{gpu.name} is {gpu.arch}: TensorRT-RTX plans are for {can}, and TensorRT 11 is not installed"


def _has_cuda_python() -> bool:
    try:
        return importlib.util.find_spec("cuda.bindings.runtime") is not None
    except ModuleNotFoundError:
        return False


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_"))
