"""Whether an engine fits the GPUs of this machine, in words."""

from __future__ import annotations

from collections.abc import Sequence

from moec.compile.gpu import Gpu, local_gpus


def misfits(targets: Sequence[str], needed_bytes: int, gpus: Sequence[Gpu] | None = None) -> list[str]:
    """Why no GPU here can run an engine; empty if one can.

    Args:
        targets: Architectures that the plan was built for.
        needed_bytes: `MemoryPlan.total`.
        gpus: The machine's GPUs; None asks the driver.
    """
    gpus = local_gpus() if gpus is None else gpus
    if not gpus:
        return ["a GPU that the NVIDIA driver lists"]
    reasons = [_misfit(gpu, targets, needed_bytes) for gpu in gpus]
    return [] if None in reasons else [reason for reason in reasons if reason is not None]


def _misfit(gpu: Gpu, targets: Sequence[str], needed_bytes: int) -> str | None:
    if gpu.arch not in targets:
        built = ", ".join(targets)
        return f"an engine for {gpu.name} ({gpu.arch}): the plan is for {built} and cannot load on another"
    if gpu.memory_bytes < needed_bytes:
        have, want = gpu.memory_bytes / 1e9, needed_bytes / 1e9
        return f"{want:.1f} GB of device memory: {gpu.name} has {have:.1f} GB"
    return None
