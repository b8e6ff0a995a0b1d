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


def open_bundle(path: str | Path, *, verify: bool = True) -> Bundle:
    """Open a bundle folder.

    Args:
        path: The folder.
        verify: Read all files but the experts and compare their checksums (about 1 s a GB).

    Raises:
        MoecError: no bundle, a newer schema, or a damaged file; one message that names it.
    """
    folder = Path(path)
    manifest = read_manifest(folder)
    if verify:
        for name, record in manifest.files.items():
            record.verify(folder / name)
    return Bundle(folder, manifest)
