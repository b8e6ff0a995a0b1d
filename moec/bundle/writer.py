"""Write a bundle beside its target and move it there in one step: all of it, or nothing."""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import tempfile
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Self

from moec.bundle.checksums import FileRecord
from moec.bundle.manifest import MANIFEST, Manifest, render
from moec.errors import MoecError

_FULL = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}


@contextmanager
def writing(path: Path, total_bytes: int) -> Iterator[None]:
    """Turn a failing write of `path` into one message.

    Args:
        path: The file that is written in the block.
        total_bytes: Its size when complete.

    Raises:
        MoecError: the disk is full (with the bytes that are missing) or refuses the write.
    """
    try:
        yield
    except OSError as error:
        if error.errno in _FULL:
            raise _disk_full(path, total_bytes) from None
        what = f"{path.name} cannot be written: {error.strerror or error}"
        raise MoecError(what, where=str(path.parent)) from None


def _disk_full(path: Path, total_bytes: int) -> MoecError:
    written = path.stat().st_size if path.exists() else 0
    what = f"No space left on the disk while writing {path.name}, which needs {total_bytes} bytes"
    hint = f"Free at least {max(total_bytes - written, 1)} bytes there, or choose another output folder."
    return MoecError(what, where=str(path.parent), hint=hint)


def write_bytes(path: Path, data: bytes) -> None:
    """Write a small file; a full disk is a MoecError."""
    with writing(path, len(data)):
        path.write_bytes(data)


def check_free_space(folder: Path, needed: int) -> None:
    """Refuse early when the disk of `folder` (which need not exist yet) has too little room.

    Raises:
        MoecError: fewer than `needed` bytes are free.
    """
    existing = next(p for p in (folder, *folder.absolute().parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < needed:
        what = f"Not enough disk space for the bundle: it needs about {needed} bytes, {free} are free"
        raise MoecError(what, where=str(folder), hint="Free some space, or choose another output folder.")


def check_target(path: Path) -> None:
    """Refuse a target that a bundle must not replace.

    Raises:
        MoecError: a file, or a folder that is neither empty nor a bundle.
    """
    if path.is_symlink() or (path.exists() and not path.is_dir()):
        raise MoecError(
            "The output path is not a folder", where=str(path), hint="Choose another output path."
        )
    if path.is_dir() and any(path.iterdir()) and not (path / MANIFEST).is_file():
        what = f"The output folder holds other files and is not a bundle (no {MANIFEST})"
        raise MoecError(what, where=str(path), hint="Choose another path, or empty that folder.")


class BundleWriter:
    """Context manager around the making of one bundle.

    Inside the block, `folder` is a temporary folder beside the target; put every file there, then call
    `finish`. Leaving the block without it, for whatever reason, removes the temporary folder and leaves
    what was at the target untouched.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path).absolute()
        self.folder = self.path
        self._temporary: Path | None = None

    def __enter__(self) -> Self:
        check_target(self.path)
        with writing(self.path, 0):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            made = tempfile.mkdtemp(prefix=f".{self.path.name}.", suffix=".building", dir=self.path.parent)
        self.folder = self._temporary = Path(made)
        self.folder.chmod(0o777 & ~_umask())
        return self

    def __exit__(self, *_: object) -> None:
        if self._temporary is not None:
            _remove(self._temporary)

    def finish(
        self,
        manifest: Manifest,
        checked_bytes: Mapping[str, int] | None = None,
        unlisted: Collection[str] = (),
    ) -> Manifest:
        """Checksum every file, write the manifest and move the bundle to its place.

        Args:
            manifest: Complete but for `files`.
            checked_bytes: Files of which only the beginning is covered by the manifest.
            unlisted: Files that the manifest does not mention, because they differ from build to build.

        Returns:
            The manifest as written.
        """
        records = self._records(checked_bytes or {})
        manifest.files.update({name: record for name, record in records.items() if name not in unlisted})
        write_bytes(self.folder / MANIFEST, render(manifest.to_json()))
        with writing(self.path, 0):
            _replace(self.folder, self.path)
        return manifest

    def _records(self, checked_bytes: Mapping[str, int]) -> dict[str, FileRecord]:
        files = sorted(p for p in self.folder.rglob("*") if p.is_file())
        names = {p.relative_to(self.folder).as_posix(): p for p in files}
        return {name: FileRecord.of(path, checked_bytes.get(name)) for name, path in names.items()}


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def _remove(folder: Path) -> None:
    """Remove a folder, also an older bundle that somebody made read-only."""
    for name, _, _ in os.walk(folder):
        with suppress(OSError):
            Path(name).chmod(0o700)
    shutil.rmtree(folder, ignore_errors=True)


def _replace(new: Path, target: Path) -> None:
    """Put `new` at `target`. An older folder there ends up at `new`, which the caller removes."""
    if not target.exists():
        new.rename(target)
    elif not _exchange(new, target):
        old = new.with_name(new.name + ".old")
        target.rename(old)
        try:
            new.rename(target)
        except BaseException:
            old.rename(target)
            raise
        old.rename(new)


def _exchange(a: Path, b: Path) -> bool:
    """Swap two paths in one system call (Linux renameat2, RENAME_EXCHANGE); False where it cannot."""
    at_cwd, exchange = -100, 2
    try:
        call = ctypes.CDLL(None, use_errno=True).renameat2
    except (AttributeError, OSError, TypeError):
        return False
    return call(at_cwd, os.fsencode(a), at_cwd, os.fsencode(b), exchange) == 0
