"""`moec doctor`: what this machine has, what is missing and how to get it."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

import click

_EXAMPLES = """\b
Examples:
  moec doctor
"""
_REQUIRED = (
    "numpy",
    "torch",
    "transformers",
    "onnx",
    "onnxscript",
    "onnx-ir",
    "onnxruntime",
    "onnx-graphsurgeon",
    "safetensors",
    "tokenizers",
    "jinja2",
    "ml-dtypes",
    "xxhash",
)


@dataclass(frozen=True)
class Finding:
    """One line of the report: `hint` says how to get what is missing; `needed`: moec needs it on CPUs too."""

    name: str
    value: str | None
    hint: str = ""
    needed: bool = True

    @property
    def mark(self) -> str:
        if self.value is not None:
            return "ok"
        return "MISSING" if self.needed else "-"


@click.command(epilog=_EXAMPLES)
def doctor() -> None:
    """Show what this machine has, what is missing and how to get it.

    Lines with a dash are only needed for engines and GPUs.
    """
    groups = {
        "Machine": _machine(),
        "Python packages": _packages(),
        "Native libraries": _libraries(),
        "Engines and GPUs": _gpu(),
    }
    found = {title: list(findings) for title, findings in groups.items()}
    for title, findings in found.items():
        click.echo(title)
        for finding in findings:
            click.echo(_line(finding))
    click.echo(_verdict([finding for findings in found.values() for finding in findings]))


def _line(finding: Finding) -> str:
    text = finding.value if finding.value is not None else f"not found; {finding.hint}"
    return f"  {finding.mark:7} {finding.name:18} {text}"


def _verdict(findings: list[Finding]) -> str:
    lacking = [finding.name for finding in findings if finding.value is None and finding.needed]
    if lacking:
        return f"\nmoec cannot build and run on this CPU yet: see {', '.join(lacking)} above."
    return "\nmoec can build bundles and run them on this CPU."


def _machine() -> Iterator[Finding]:
    from moec.runtime import cpu_info
    from moec.version import __version__

    total, available = cpu_info.memory_bytes()
    yield Finding("moec", __version__)
    yield Finding("python", f"{platform.python_version()} ({sys.executable})")
    yield Finding("system", platform.platform())
    yield Finding("cpu", f"{cpu_info.cpu_name()}, {cpu_info.physical_cores()} cores usable")
    yield Finding(
        "instruction sets", " ".join(cpu_info.instruction_sets()) or "none that moec has kernels for"
    )
    yield Finding("memory", f"{total / 1e9:.1f} GB, {available / 1e9:.1f} GB available")


def _packages() -> Iterator[Finding]:
    for name in _REQUIRED:
        yield _package(name, needed=True)


def _package(name: str, needed: bool, install: str | None = None) -> Finding:
    try:
        return Finding(name, version(name), needed=needed)
    except PackageNotFoundError:
        return Finding(name, None, f"pip install {install or name}", needed)


def _libraries() -> Iterator[Finding]:
    from moec.errors import MoecError

    try:
        from moec.native import cpu_isa, cpu_library

        yield Finding("libmoec_cpu", f"{cpu_library()} ({cpu_isa()} kernels)")
    except (ImportError, MoecError) as error:
        first = " ".join(str(error).split())
        yield Finding("libmoec_cpu", None, f"pip install . builds it ({first})")


def _gpu() -> Iterator[Finding]:
    from moec.runtime import gpu_info

    nvcc, driver, gpus = gpu_info.find_nvcc(), gpu_info.driver_version(), gpu_info.gpu_names()
    yield _package("tensorrt-rtx", needed=False)
    yield _package(
        "tensorrt", needed=False, install="'moec[tensorrt]' (for datacenter GPUs such as H100, B200)"
    )
    yield _package("cuda-python", needed=False, install="'moec[gpu]'")
    yield Finding(
        "nvcc", str(nvcc) if nvcc else None, "pip install nvidia-cuda-nvcc, or the CUDA toolkit", False
    )
    yield Finding("CUDA driver", f"for CUDA {driver}" if driver else None, gpu_info.DRIVER_HINT, False)
    yield Finding(
        "GPU", "; ".join(gpus) if gpus else None, "running on a GPU needs one, building does not", False
    )
