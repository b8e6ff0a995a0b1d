"""The NVIDIA GPUs and the driver of this machine, asked of libcuda directly: no CUDA package needed."""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

_MAJOR, _MINOR = 75, 76  # CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_{MAJOR,MINOR}


@dataclass(frozen=True)
class Gpu:
    """One CUDA device: its name, architecture (sm_89) and bytes of memory."""

    name: str
    arch: str
    memory_bytes: int


def driver() -> ctypes.CDLL | None:
    """libcuda.so.1, or None where no NVIDIA driver is installed."""
    try:
        return ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None


def local_gpus() -> list[Gpu]:
    """Every CUDA device, in the driver's order; empty without a driver or without a device."""
    cuda = driver()
    count = ctypes.c_int()
    if cuda is None or cuda.cuInit(0) or cuda.cuDeviceGetCount(ctypes.byref(count)):
        return []
    return [_describe(cuda, index) for index in range(count.value)]


def _describe(cuda: ctypes.CDLL, index: int) -> Gpu:
    name, memory = ctypes.create_string_buffer(256), ctypes.c_size_t()
    cuda.cuDeviceGetName(name, len(name), index)
    cuda.cuDeviceTotalMem_v2(ctypes.byref(memory), index)
    arch = f"sm_{_attribute(cuda, _MAJOR, index)}{_attribute(cuda, _MINOR, index)}"
    return Gpu(name.value.decode(), arch, memory.value)


def _attribute(cuda: ctypes.CDLL, attribute: int, index: int) -> int:
    value = ctypes.c_int()
    cuda.cuDeviceGetAttribute(ctypes.byref(value), attribute, index)
    return value.value
