"""Mistakes are found before anything slow happens, each with one message."""

from __future__ import annotations

from pathlib import Path

import pytest

from moec.builder import build
from moec.builder.options import BuildOptions, check_context, check_options, estimated_bytes
from moec.bundle import writer
from moec.checkpoint import open_checkpoint
from moec.errors import MoecError


def options(model: Path, output: Path, **changes) -> BuildOptions:
    fields = dict(
        context=None, batch=4, kv="mkv2", weights="int4", experts="int4", calibration=(), dump_dir=None
    )
    return BuildOptions(model, output, **(fields | changes))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"kv": "int3"}, "--kv int3 is unknown"),
        ({"weights": "fp8"}, "--weights fp8 is unknown"),
        ({"experts": "mxfp4"}, "--experts mxfp4 is unknown"),
        ({"context": 0}, "context is 0"),
        ({"batch": -1}, "batch is -1"),
        ({"batch": 5000}, "batch 5000 is more than"),
        ({"calibration": (Path("/nowhere/text.txt"),)}, "calibration file cannot be read"),
    ],
)
def test_bad_values(tmp_path, changes, message):
    with pytest.raises(MoecError, match=message):
        check_options(options(tmp_path / "model", tmp_path / "out", **changes))


@pytest.mark.parametrize(("model", "output", "which"), [("", "out", "model"), ("model", "", "output")])
def test_empty_paths(model, output, which):
    with pytest.raises(MoecError, match=f"The path of the {which} is empty"):
        build(model, output)


def test_paths_that_would_destroy_something(tmp_path):
    model = tmp_path / "a" / "model"
    model.mkdir(parents=True)
    for output in (model, model / "bundle", tmp_path / "a"):
        with pytest.raises(MoecError, match="must not contain each other"):
            check_options(options(model, output))
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "thesis.tex").write_text("x")
    with pytest.raises(MoecError, match="not a bundle"):
        check_options(options(model, tmp_path / "b"))
    for dump in (tmp_path / "out", tmp_path / "out" / "dump"):
        with pytest.raises(MoecError, match="dump folder is inside"):
            check_options(options(model, tmp_path / "out", dump_dir=dump))
    with pytest.raises(MoecError, match="dump path is not a folder"):
        check_options(options(model, tmp_path / "out", dump_dir=tmp_path / "b" / "thesis.tex"))
    check_options(options(model, tmp_path / "out", dump_dir=tmp_path / "dump"))


def test_a_link_into_the_model_is_seen_through(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "model")
    with pytest.raises(MoecError, match="must not contain"):
        check_options(options(tmp_path / "model", tmp_path / "link" / "out"))


def test_context(checkpoint_folder):
    checkpoint = open_checkpoint(checkpoint_folder)
    assert check_context(checkpoint, None) == 1024
    assert check_context(checkpoint, 1024) == 1024
    with pytest.raises(MoecError, match="context 1025 is longer than the model's 1024"):
        check_context(checkpoint, 1025)


def test_the_estimate_covers_the_bundle(checkpoint_folder, tmp_path):
    wanted = options(checkpoint_folder, tmp_path / "out", kv="fp16", weights="bf16", experts="bf16")
    estimate = estimated_bytes(open_checkpoint(checkpoint_folder), wanted)
    report = build(checkpoint_folder, tmp_path / "out", kv="fp16", weights="bf16", experts="bf16")
    assert report.sizes["total"] < estimate < report.sizes["total"] + (17 << 20)


def test_a_full_disk_is_found_before_the_work(checkpoint_folder, tmp_path, monkeypatch):
    usage = type("Usage", (), {"free": 1000})
    monkeypatch.setattr(writer.shutil, "disk_usage", lambda _: usage)
    with pytest.raises(MoecError, match=r"needs about \d+ bytes, 1000 are free"):
        build(checkpoint_folder, tmp_path / "out")
    assert list(tmp_path.iterdir()) == []
