"""Compile CUDA sources with the host compiler under the SIMT emulator and load them with ctypes."""

import ctypes
import hashlib
import os
import shutil
import subprocess
from functools import cache
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
PLUGINS = ROOT / "plugins"
SCHEDULES = (0, 1, 2)  # simt::Schedule: forward, reverse, random
BASE_FLAGS = ("-std=c++17", "-O2", "-Wall", "-Wextra", "-Wno-unknown-pragmas", "-ffp-contract=off", "-shared",
              "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique")  # fmt: skip


class SimtError(RuntimeError):
    """The emulator stopped a kernel; the message names block and thread."""


def host_compiler() -> str:
    """The C++ compiler, or skip the calling test with the reason."""
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        pytest.skip("no C++ compiler on the PATH")
    return compiler


def cpu_has_f16c() -> bool:
    """Whether this CPU converts halves in hardware (the emulator's portable path works anywhere)."""
    info = Path("/proc/cpuinfo")
    return info.exists() and " f16c" in info.read_text()


def source_digest(source: Path, flags: tuple[str, ...]) -> str:
    """Hash of a source with everything it may include, so that a cached library is never stale."""
    digest = hashlib.sha256(repr((BASE_FLAGS, flags, host_compiler())).encode())
    headers = [p for folder in ("simt", "kernels") for p in sorted((PLUGINS / folder).rglob("*.*h"))]
    for path in [source, *headers]:
        digest.update(path.read_bytes())
    return digest.hexdigest()[:20]


@cache
def compile_simt(source: Path, flags: tuple[str, ...] = (), f16c: bool = True) -> ctypes.CDLL:
    """Build `source` (which includes the emulator) into a library under build/simt and load it."""
    if f16c and cpu_has_f16c():
        flags = (*flags, "-mf16c")
    folder = ROOT / "build" / "simt"
    library = folder / f"{source.stem}-{source_digest(source, flags)}.so"
    if not library.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = library.with_suffix(f".{os.getpid()}.tmp")
        command = [
            host_compiler(),
            *BASE_FLAGS,
            *flags,
            "-I",
            str(PLUGINS),
            "-x",
            "c++",
            str(source),
            "-o",
            str(partial),
        ]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr[-4000:]
        partial.replace(library)
    return ctypes.CDLL(str(library))


def pointer(array: np.ndarray | None) -> ctypes.c_void_p:
    """Address of a contiguous array (None: null)."""
    if array is None:
        return ctypes.c_void_p(None)
    assert array.flags.c_contiguous
    return ctypes.c_void_p(array.ctypes.data)
