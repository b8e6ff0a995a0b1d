"""Build tests/gpu/harness.cu with the kernels for one architecture; the library runs them on a real GPU."""

from __future__ import annotations

import ctypes
import hashlib
import os
import re
import shutil
import subprocess
import tempfile
from functools import cache
from pathlib import Path

import pytest

from tests.helpers.kernels import PARAMS, PTR
from tests.helpers.simt import PLUGINS, ROOT

SOURCES = ROOT / "tests" / "gpu"
# The arithmetic of the KV format is compiled without contraction in the product, so here too.
FLAGS = ("-std=c++17", "-O1", "-fmad=false", "-shared", "-Xcompiler", "-fPIC,-fvisibility=hidden,-Wall")


class NoCompilerError(RuntimeError):
    """There is no nvcc or no CMake; the message says which."""


def harness(arch: str) -> Path:
    """The harness library for `arch` (sm_80), from build/gpu where it is up to date.

    Raises:
        NoCompilerError: nothing here can compile CUDA.
        AssertionError: it does not compile; with the end of what the compiler said.
    """
    if not shutil.which("cmake"):
        raise NoCompilerError("no cmake on the PATH")
    library = ROOT / "build" / "gpu" / f"harness-{arch}-{_digest()}.so"
    if not library.exists():
        library.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="moec-harness-") as folder:
            _compile(arch, Path(folder), library)
    return library


def _digest() -> str:
    digest = hashlib.sha256(repr(FLAGS).encode())
    files = [path for folder in (PLUGINS / "kernels", SOURCES) for path in folder.iterdir() if path.is_file()]
    for path in sorted(path for path in files if path.suffix != ".py"):
        digest.update(path.name.encode() + path.read_bytes())
    return digest.hexdigest()[:20]


def _compile(arch: str, folder: Path, library: Path) -> None:
    """The kernels as the product compiles them (CMake), then the harness linked with them."""
    number = arch.removeprefix("sm_")
    said = _run("cmake", "-S", str(PLUGINS), "-B", str(folder), f"-DMOEC_CUDA_ARCHS={number}")
    if "no nvcc" in said:
        raise NoCompilerError("no nvcc: on the PATH, in /usr/local/cuda, or from PyPI")
    _run("cmake", "--build", str(folder), "--target", "moec_kernels")
    cache_text = (folder / "CMakeCache.txt").read_text()
    nvcc, runtime = (_cached(cache_text, name) for name in ("MOEC_NVCC", "MOEC_CUDART_STATIC"))
    archive = next(folder.rglob("libmoec_kernels.a"))
    partial = library.with_suffix(f".{os.getpid()}.tmp")
    _run(
        nvcc, *FLAGS, "-gencode", f"arch=compute_{number},code=sm_{number}", "-I", str(PLUGINS),
        *_toolkit(Path(runtime)), str(SOURCES / "harness.cu"), str(archive), "-o", str(partial),
    )  # fmt: skip
    partial.replace(library)


def _toolkit(runtime: Path) -> list[str]:
    """Where headers and the runtime are: nvcc from PyPI does not know by itself."""
    root = next(p for p in runtime.parents if (p / "include" / "cuda_runtime.h").exists())
    return ["-I", str(root / "include"), "-L", str(runtime.parent)]


def _cached(text: str, name: str) -> str:
    match = re.search(rf"^{name}:\w+=(.+)$", text, re.MULTILINE)
    assert match, f"CMakeCache.txt has no {name}"
    return match.group(1)


def _run(*command: str) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def load(path: Path) -> ctypes.CDLL:
    """The library with its functions typed as the emulator's, see tests/helpers/kernels.py."""
    lib = ctypes.CDLL(str(path))
    lib.params_bytes.restype = ctypes.c_size_t
    lib.run_activation.restype = ctypes.c_float
    lib.run_activation.argtypes = [PTR, ctypes.c_float, ctypes.c_float]
    for i, params in enumerate(PARAMS):
        assert lib.params_bytes(i) == ctypes.sizeof(params)
    return lib


@cache
def gpu_library(arch: str) -> ctypes.CDLL:
    """The kernels for the local GPU; skips the calling test where nothing can compile them."""
    try:
        return load(harness(arch))
    except NoCompilerError as error:
        pytest.skip(str(error))
