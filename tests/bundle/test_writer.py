"""A bundle appears whole or not at all; what was there before survives every failure."""

from __future__ import annotations

import errno
import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from moec.bundle import writer as writer_module
from moec.bundle.reader import open_bundle
from moec.bundle.writer import BundleWriter, check_free_space, check_target, write_bytes, writing
from moec.errors import MoecError
from tests.bundle.bundles import small_manifest, write_bundle
from tests.helpers.permissions import obey_permissions


def listing(folder: Path) -> list[str]:
    return sorted(p.name for p in folder.iterdir())


def test_a_new_bundle_lands_at_its_path(tmp_path):
    write_bundle(tmp_path / "deep" / "out", random.Random(0))
    assert listing(tmp_path / "deep") == ["out"]
    assert open_bundle(tmp_path / "deep" / "out").manifest.model.name == "model"


@pytest.mark.parametrize("exchange", [True, False])
def test_a_bundle_replaces_an_older_one(tmp_path, monkeypatch, exchange):
    if not exchange:
        monkeypatch.setattr(writer_module, "_exchange", lambda *_: False)
    target = tmp_path / "out"
    write_bundle(target, random.Random(0), "old")
    (target / "leftover").write_text("of the old bundle")
    write_bundle(target, random.Random(1), "new")
    assert open_bundle(target).manifest.model.name == "new"
    assert not (target / "leftover").exists()
    assert listing(tmp_path) == ["out"]


def test_a_read_only_bundle_is_replaced_and_removed(tmp_path):
    """In a process that obeys permissions: root would remove it anyway."""
    write_bundle(tmp_path / "out", random.Random(0), "old")
    (tmp_path / "out").chmod(0o555)
    code = (
        "import random, sys; from pathlib import Path; from tests.bundle.bundles import write_bundle;"
        "write_bundle(Path(sys.argv[1]), random.Random(1), 'new')"
    )
    command = [sys.executable, "-c", code, str(tmp_path / "out")]
    subprocess.run(command, check=True, timeout=60, preexec_fn=obey_permissions)
    assert open_bundle(tmp_path / "out").manifest.model.name == "new"
    assert listing(tmp_path) == ["out"]


def fail_half_way(target: Path, failure) -> None:
    with BundleWriter(target) as writer:
        (writer.folder / "weights.safetensors").write_bytes(b"half")
        raise failure


@pytest.mark.parametrize("failure", [KeyboardInterrupt, RuntimeError, MoecError("bad"), SystemExit])
def test_a_failure_leaves_the_old_bundle_and_no_temporary_folder(tmp_path, failure):
    target = tmp_path / "out"
    write_bundle(target, random.Random(0), "old")
    with pytest.raises((KeyboardInterrupt, RuntimeError, MoecError, SystemExit)):
        fail_half_way(target, failure)
    assert open_bundle(target).manifest.model.name == "old"
    assert listing(tmp_path) == ["out"]


def test_a_failing_move_leaves_the_old_bundle(tmp_path, monkeypatch):
    target = tmp_path / "out"
    write_bundle(target, random.Random(0), "old")
    real = Path.rename

    def rename(self, new):
        if ".building" in self.name and not self.name.endswith(".old"):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(self, new)

    monkeypatch.setattr(writer_module, "_exchange", lambda *_: False)
    monkeypatch.setattr(Path, "rename", rename)
    with pytest.raises(MoecError, match="cannot be written"):
        write_bundle(target, random.Random(1), "new")
    assert open_bundle(target).manifest.model.name == "old"
    assert listing(tmp_path) == ["out"]


def test_leaving_without_finish_makes_nothing(tmp_path):
    with BundleWriter(tmp_path / "out"):
        pass
    assert listing(tmp_path) == []


def test_targets_that_must_not_be_replaced(tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(MoecError, match="not a folder"):
        check_target(tmp_path / "file")
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "1.jpg").write_text("x")
    with pytest.raises(MoecError, match="not a bundle"):
        check_target(tmp_path / "photos")
    (tmp_path / "empty").mkdir()
    check_target(tmp_path / "empty")
    check_target(tmp_path / "nothing")


def test_a_full_disk_names_file_and_bytes(tmp_path):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(b"x" * 300)
    with (
        pytest.raises(MoecError, match=r"weights\.safetensors, which needs 1000 bytes") as caught,
        writing(path, 1000),
    ):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    assert "700 bytes" in caught.value.hint


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="no /dev/full")
def test_a_full_device_is_reported_by_the_real_error(tmp_path):
    (tmp_path / "model.onnx").symlink_to("/dev/full")
    with pytest.raises(MoecError, match=r"No space left.*model\.onnx"):
        write_bytes(tmp_path / "model.onnx", b"x" * 5000)


def test_too_little_free_space_is_found_early(tmp_path):
    check_free_space(tmp_path / "not" / "yet", 1)
    with pytest.raises(MoecError, match="needs about 1152921504606846976 bytes"):
        check_free_space(tmp_path / "not" / "yet", 1 << 60)


def test_the_bundle_folder_has_ordinary_permissions(tmp_path):
    write_bundle(tmp_path / "out", random.Random(0))
    (tmp_path / "other").mkdir()
    assert (tmp_path / "out").stat().st_mode == (tmp_path / "other").stat().st_mode


def test_finish_records_every_file(tmp_path):
    manifest = write_bundle(tmp_path / "out", random.Random(0))
    assert set(manifest.files) == {
        "weights.safetensors",
        "model.onnx",
        "experts.moex",
        "tokenizer/tokenizer.json",
    }
    assert manifest.files["experts.moex"].checked_bytes == 512
    assert small_manifest().files == {}


def test_unlisted_files_are_in_the_folder_only(tmp_path):
    with BundleWriter(tmp_path / "out") as writer:
        (writer.folder / "build_report.json").write_text("{}")
        manifest = writer.finish(small_manifest(), unlisted=["build_report.json"])
    assert manifest.files == {}
    assert listing(tmp_path / "out") == ["build_report.json", "manifest.json"]
    open_bundle(tmp_path / "out")
