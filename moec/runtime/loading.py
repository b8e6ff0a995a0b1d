"""Opens a bundle on a device and makes a session of it."""

from __future__ import annotations

from pathlib import Path

from moec.bundle.reader import Bundle, open_bundle
from moec.errors import MoecError
from moec.runtime.gpu_info import no_tensorrt
from moec.runtime.session import Session
from moec.runtime.tokenizer import Tokenizer

DEVICES = ("auto", "cpu", "tensorrt")


def load(path: str | Path, device: str = "auto", *, threads: int | None = None) -> Session:
    """Loads a bundle.

    Args:
        path: The bundle folder.
        device: cpu | tensorrt | auto (the best one that this version of moec can use here: the CPU).
        threads: CPU threads; None takes every physical core.

    Raises:
        MoecError: No bundle, a damaged or newer one, or a device that is not there.
    """
    if device not in DEVICES:
        raise MoecError(f"Unknown device {device!r}", hint=f"Known are {', '.join(DEVICES)}")
    if threads is not None and threads < 1:
        raise MoecError(f"threads is {threads}, but must be at least 1")
    bundle = open_bundle(path)
    if device == "tensorrt":
        raise no_tensorrt(bundle.manifest.engines)
    from moec.runtime.backends.cpu_bundle import open_cpu_backend

    return _session(bundle, open_cpu_backend(bundle, threads))


def _session(bundle: Bundle, backend: object) -> Session:
    manifest = bundle.manifest
    tokenizer = Tokenizer.from_folder(bundle.path) if manifest.tokenizer.has_tokenizer else None
    eos_ids = manifest.tokenizer.eos_token_ids
    if not eos_ids and tokenizer is not None and tokenizer.eos_id is not None:
        eos_ids = (tokenizer.eos_id,)
    return Session(
        backend,
        tokenizer,
        layouts=[manifest.kv[layer] for layer in sorted(manifest.kv)],
        eos_ids=eos_ids,
        defaults=manifest.generation,
    )
