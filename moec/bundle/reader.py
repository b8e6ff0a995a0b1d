"""Open a bundle: everything small and the dense weights are verified here, experts at their first use."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moec.bundle.manifest import Manifest, read_manifest
from moec.errors import MoecError


@dataclass(frozen=True)
class Bundle:
    """A verified bundle folder."""

    path: Path
    manifest: Manifest

    def file(self, name: str) -> Path:
        """The path of one of the bundle's files.

        Raises:
            MoecError: the manifest has no such file.
        """
        if name not in self.manifest.files:
            raise MoecError(f"The bundle has no {name}", where=str(self.path))
        return self.path / name


def open_bundle(path: str | Path, *, verify: bool = True, plan: bool = False) -> Bundle:
    """Open a bundle folder.

    Args:
        path: The folder.
        verify: Read all files but the experts and compare their checksums (about 1 s a GB).
        plan: Also open what `moec build --plan-only` made, which has no weights.

    Raises:
        MoecError: no bundle, a plan, a newer schema, or a damaged file; one message that names it.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    if manifest.plan and not plan:
        raise _no_weights(folder, manifest)
    if verify:
        for name, record in manifest.files.items():
            record.verify(folder / name)
    return Bundle(folder, manifest)


_OPTIONS = ("context", "batch", "kv", "weights", "experts", "target", "dtype")


def _no_weights(folder: Path, manifest: Manifest) -> MoecError:
    """Says how to add the weights: the very command."""
    flags = " ".join(f"--{name} {manifest.options[name]}" for name in _OPTIONS if name in manifest.options)
    hint = f"Add them where the checkpoint is: moec build CHECKPOINT -o {folder} {flags}"
    what = f"This bundle is a plan of {manifest.model.name}: it has no weights"
    return MoecError(what, where=str(folder), hint=hint)
