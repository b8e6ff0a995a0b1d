"""GPU targets: `auto | cpu | sm_80,sm_86,...`, and which TensorRT builds for which."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import re
from dataclasses import dataclass

from moec.compile.gpu import local_gpus
from moec.errors import MoecError

RTX_TARGETS = ("sm_80", "sm_86", "sm_89", "sm_120")
"""What `auto` builds for: one TensorRT-RTX plan serves all four, and needs no GPU to build."""
RTX_CAN = (*RTX_TARGETS, "sm_121")
KERNEL_TARGETS = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
"""Architectures that the plugin library has machine code for (others use its PTX, from sm_120 on)."""
_NAMES = {
    "sm_80": "A100",
    "sm_86": "RTX 30, A10",
    "sm_89": "RTX 40, L4",
    "sm_90": "H100, H200",
    "sm_100": "B200",
    "sm_103": "B300",
    "sm_120": "RTX 50",
    "sm_121": "DGX Spark",
}


@dataclass(frozen=True)
class Targets:
    """What to build: the CPU graph is always in a bundle; `engines` maps a module to its architectures."""

    engines: dict[str, tuple[str, ...]]

    @property
    def cpu_only(self) -> bool:
        return not self.engines


def parse_targets(text: str) -> Targets:
    """`--target`: comma separated; `auto` = cpu and the TensorRT-RTX targets; `cpu` = no engine.

    Raises:
        MoecError: an unknown target, or one that no TensorRT on this machine builds for.
    """
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    archs: list[str] = []
    for word in words or ["auto"]:
        archs += _expand(word)
    archs = sorted(set(archs), key=_number)
    rtx = tuple(arch for arch in archs if arch in RTX_CAN)
    others = tuple(arch for arch in archs if arch not in RTX_CAN)
    engines = {}
    if rtx:
        _need_rtx(rtx)
        engines["tensorrt_rtx"] = rtx
    if others:
        _need_tensorrt(others)
        engines["tensorrt"] = others
    return Targets(engines)


def _expand(word: str) -> list[str]:
    if word == "cpu":
        return []
    if word == "auto":
        return list(RTX_TARGETS) if has_module("tensorrt_rtx") else []
    if not re.fullmatch(r"sm_\d{2,3}", word):
        raise MoecError(
            f"unknown target {word!r}", hint="Targets are auto, cpu and sm_80, sm_86, sm_89, sm_120."
        )
    if _number(word) < 80:
        raise MoecError(f"target {word} is older than sm_80, which the kernels need")
    return [word]


def _number(arch: str) -> int:
    return int(arch.removeprefix("sm_"))


def has_module(name: str) -> bool:
    """Whether a TensorRT module is installed (it is not imported)."""
    return importlib.util.find_spec(name) is not None


def module_version(name: str) -> str | None:
    """Version of the installed module's wheel, or None."""
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def _need_rtx(archs: tuple[str, ...]) -> None:
    if not has_module("tensorrt_rtx"):
        raise MoecError(
            f"an engine for {', '.join(archs)} needs TensorRT-RTX, which is not installed",
            hint="pip install tensorrt-rtx (Linux x86-64), or build with --target cpu",
        )


def _need_tensorrt(archs: tuple[str, ...]) -> None:
    """sm_90, sm_100...: TensorRT 11 builds for the GPU of the machine it runs on, and for no other."""
    here = {gpu.arch for gpu in local_gpus()}
    if has_module("tensorrt") and set(archs) == here:
        return
    gpus = ", ".join(f"{arch} ({_NAMES[arch]})" if arch in _NAMES else arch for arch in archs)
    installed = "installed" if has_module("tensorrt") else "not installed"
    raise MoecError(
        f"TensorRT-RTX cannot build for {gpus}, and the plan it builds for other targets cannot load there",
        hint="TensorRT 11 builds for such a GPU, on a machine that has one: there, pip install "
        "'moec[tensorrt]' and repeat this command.\n"
        f"  Here TensorRT 11 is {installed}, and the GPUs are: {', '.join(sorted(here)) or 'none'}.",
    )
