"""What the CPU of this machine is: cores this process may use, instruction sets, memory."""

from __future__ import annotations

import os
import platform
from pathlib import Path

_TOPOLOGY = Path("/sys/devices/system/cpu")
_CPU_MAX = Path("/sys/fs/cgroup/cpu.max")
# What the CPU kernels dispatch on, and what their users ask about.
_INTERESTING = ("avx2", "fma", "f16c", "avx512f", "avx512bw", "avx512_vnni", "avx_vnni", "amx_int8", "asimd")


def physical_cores() -> int:
    """Physical cores this process may run on, at most its cgroup's CPU quota, at least 1."""
    logical = _allowed_cpus()
    cores = {_core_of(cpu) for cpu in logical}
    quota = _quota()
    return max(1, min(len(cores), quota) if quota else len(cores))


def _allowed_cpus() -> set[int]:
    if hasattr(os, "sched_getaffinity"):
        return os.sched_getaffinity(0)
    return set(range(os.cpu_count() or 1))


def _core_of(cpu: int) -> str:
    """Names the core of a logical CPU; siblings (hyper-threads) share the name."""
    try:
        return (_TOPOLOGY / f"cpu{cpu}/topology/thread_siblings_list").read_text().strip()
    except OSError:
        return str(cpu)


def _quota() -> int | None:
    """The container's CPU quota in whole CPUs (rounded up), None without one."""
    try:
        quota, period = _CPU_MAX.read_text().split()
        return None if quota == "max" else max(1, -(-int(quota) // int(period)))
    except (OSError, ValueError):
        return None


def _cpuinfo() -> dict[str, str]:
    try:
        first = Path("/proc/cpuinfo").read_text().split("\n\n", 1)[0]
    except OSError:
        return {}
    pairs = (line.split(":", 1) for line in first.splitlines() if ":" in line)
    return {key.strip(): value.strip() for key, value in pairs}


def cpu_name() -> str:
    return _cpuinfo().get("model name") or platform.processor() or platform.machine()


def instruction_sets() -> list[str]:
    """The instruction sets of `_INTERESTING` that this CPU has (Linux; empty elsewhere)."""
    info = _cpuinfo()
    flags = set((info.get("flags") or info.get("Features") or "").split())
    return [name for name in _INTERESTING if name in flags]


def memory_bytes() -> tuple[int, int]:
    """(total, available) bytes of RAM; (0, 0) where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
    except OSError:
        return 0, 0
    values = {line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines}
    return values.get("MemTotal", 0), values.get("MemAvailable", 0)
