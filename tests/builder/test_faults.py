"""Builds that fail or are interrupted, at every stage: nothing is left behind, an older bundle stays."""

from __future__ import annotations

import errno
import os
import shutil
import subprocess
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest

from moec.builder import build
from moec.bundle.reader import open_bundle
from moec.bundle.writer import BundleWriter
from moec.checkpoint import open_checkpoint
from moec.errors import MoecError
from moec.frontend.capture import Captured, capture
from tests.helpers.tiny import tiny_checkpoint

STAGES = import_module("moec.builder.build")
OPTIONS = {"context": 64, "batch": 1, "kv": "fp16"}


@pytest.fixture(scope="module")
def older(checkpoint_folder, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("older")
    build(checkpoint_folder, folder / "bundle", **OPTIONS)
    return folder / "bundle"


@pytest.fixture(autouse=True)
def _one_export(checkpoint_folder, older, monkeypatch):
    """The export takes seconds: all builds of this file start from clones of one."""
    captured = exported(checkpoint_folder)
    clone = lambda *_: Captured(captured.model.clone(), captured.geometry)  # noqa: E731
    monkeypatch.setattr(STAGES, "capture", clone)


@cache
def exported(folder: Path) -> Captured:
    return capture(open_checkpoint(folder), OPTIONS["batch"], OPTIONS["context"])


@pytest.fixture
def target(older, tmp_path) -> Path:
    shutil.copytree(older, tmp_path / "bundle")
    return tmp_path / "bundle"


def untouched(target: Path, older: Path) -> bool:
    opened = open_bundle(target).manifest == open_bundle(older).manifest
    return opened and [p.name for p in target.parent.iterdir()] == ["bundle"]


def raiser(error):
    def fail(*_, **__):
        raise error

    return fail


@pytest.mark.parametrize(
    "stage",
    ["open_checkpoint", "capture", "pipeline.run", "calibrate_stage", "write_weights", "write_experts",
     "bind_weights", "copy_model_files", "size_table"],
)  # fmt: skip
def test_ctrl_c_at_every_stage(target, older, checkpoint_folder, monkeypatch, stage):
    owner = STAGES.pipeline if "." in stage else STAGES
    monkeypatch.setattr(owner, stage.split(".")[-1], raiser(KeyboardInterrupt()))
    if stage == "size_table":  # after the bundle has been replaced: it is complete
        with pytest.raises(KeyboardInterrupt):
            build(checkpoint_folder, target, **OPTIONS)
        open_bundle(target)
        return
    with pytest.raises(KeyboardInterrupt):
        build(checkpoint_folder, target, **(OPTIONS | {"experts": "bf16"}))
    assert untouched(target, older)


def test_ctrl_c_while_packing(target, older, checkpoint_folder, monkeypatch):
    """In the middle of a file, not between two stages."""
    written = []

    def interrupt(nbytes):
        written.append(nbytes)
        if len(written) == 5:
            raise KeyboardInterrupt

    real = STAGES.write_experts
    monkeypatch.setattr(STAGES, "write_experts", lambda *a: real(*a[:4], interrupt))
    with pytest.raises(KeyboardInterrupt):
        build(checkpoint_folder, target, **OPTIONS)
    assert len(written) == 5
    assert untouched(target, older)


@pytest.mark.parametrize("name", ["weights.safetensors", "experts.moex", "model.onnx", "manifest.json"])
def test_a_full_disk(target, older, checkpoint_folder, monkeypatch, name):
    """The n-th file cannot be written: the real ENOSPC of /dev/full."""
    real_enter = BundleWriter.__enter__

    def enter(self):
        writer = real_enter(self)
        (writer.folder / name).symlink_to("/dev/full")
        return writer

    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    monkeypatch.setattr(BundleWriter, "__enter__", enter)
    monkeypatch.setattr(BundleWriter, "_records", lambda *_: {})  # /dev/full cannot be hashed
    with pytest.raises(
        MoecError, match=rf"No space left on the disk while writing {name}, which needs \d+ bytes"
    ):
        build(checkpoint_folder, target, **OPTIONS)
    assert untouched(target, older)


def test_a_real_small_disk(checkpoint_folder, tmp_path, monkeypatch):
    """A tmpfs of 400 KB, where this test may mount one."""
    disk = tmp_path / "disk"
    disk.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", disk]
    if subprocess.run(mount, capture_output=True).returncode:
        pytest.skip("cannot mount a tmpfs")
    try:
        with pytest.raises(MoecError, match="Not enough disk space for the bundle"):
            build(checkpoint_folder, disk / "bundle", **OPTIONS)
        monkeypatch.setattr(STAGES, "check_disk", lambda *_: None)
        monkeypatch.setattr(STAGES, "check_free_space", lambda *_: None)
        with pytest.raises(MoecError, match="No space left on the disk while writing experts"):
            build(checkpoint_folder, disk / "bundle", **(OPTIONS | {"experts": "bf16"}))
        assert list(disk.iterdir()) == []
    finally:
        subprocess.run(["umount", disk], check=True)


def test_an_unreadable_output_folder(checkpoint_folder, tmp_path):
    (tmp_path / "file").write_text("x")
    with pytest.raises(MoecError, match="cannot be written"):
        build(checkpoint_folder, tmp_path / "file" / "bundle", **OPTIONS)


def test_an_error_of_the_disk_is_no_traceback(target, older, checkpoint_folder, monkeypatch):
    monkeypatch.setattr(Path, "write_bytes", raiser(OSError(errno.EIO, os.strerror(errno.EIO))))
    with pytest.raises(MoecError, match="cannot be written: Input/output error"):
        build(checkpoint_folder, target, **OPTIONS)
    monkeypatch.undo()
    assert untouched(target, older)


def test_weights_cut_off_under_our_feet(target, older, tmp_path_factory):
    """A truncated shard is refused on opening, so nothing starts."""
    model = tiny_checkpoint(tmp_path_factory.mktemp("cut") / "model")
    weights = model / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(MoecError, match="truncated"):
        build(model, target, **OPTIONS)
    assert untouched(target, older)
