"""Cache formats by name and by budget, from `build` to the bundle and back."""

from __future__ import annotations

import json

import numpy as np
import pytest

import moec
from moec.builder import build
from moec.builder.cache import raised_layers
from moec.bundle.reader import open_bundle
from moec.calibrate import budget
from moec.errors import MoecError
from moec.progress import Progress
from tests.helpers.tiny import shakespeare
from tests.helpers.trt_engine import need_tensorrt

SMALL = {"context": 256, "batch": 1, "target": "cpu"}


class Recorder(Progress):
    """Keeps lines for the user."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def info(self, text: str) -> None:
        self.lines.append(text)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(shakespeare(4000), encoding="utf-8")
    return path


def test_layers_are_named_by_format():
    assert raised_layers({3: "fp16", 0: "k4v2", 12: "k4v2"}) == "k4v2: layers 0, 12; fp16: layer 3"


def test_auto_raises_layers_and_says_so(checkpoint_folder, tmp_path, text_file):
    progress = Recorder()
    report = build(
        checkpoint_folder, tmp_path / "bundle", kv="auto", kv_budget=1e-5, calibration=text_file,
        progress=progress, **SMALL,
    )  # fmt: skip
    assert report.cache["divergence"] <= report.cache["budget"] == 1e-5
    raised = {int(layer): format for layer, format in report.cache["raised"].items()}
    assert raised
    assert f"  raised above mkv2: {raised_layers(raised)}" in progress.lines
    bundle = open_bundle(tmp_path / "bundle")
    assert {i: x.format for i, x in bundle.manifest.kv.items()} == {0: "mkv2", 1: "mkv2"} | raised
    kept = json.loads((tmp_path / "bundle" / "build_report.json").read_text())
    assert kept["cache"] == report.cache
    assert {layer["layer"] for layer in kept["cache"]["layers"]} == {0, 1}
    logits = moec.load(tmp_path / "bundle", "cpu").score(list(range(4, 204)))
    assert np.isfinite(logits).all()


def test_formats_by_name_and_a_warning_where_one_is_too_coarse(
    checkpoint_folder, tmp_path, text_file, monkeypatch
):
    monkeypatch.setattr("moec.builder.cache.LAYER_LIMIT", 1e-6)
    report = build(checkpoint_folder, tmp_path / "bundle", kv="mkv2-lean", calibration=text_file, **SMALL)
    layouts = open_bundle(tmp_path / "bundle").manifest.kv
    assert {x.format for x in layouts.values()} == {"mkv2_lean"}
    layers = report.cache["layers"]
    assert [layer["layer"] for layer in layers] == [0, 1]
    assert all(0 < layer["error"] < 0.5 for layer in layers)
    assert any("mkv2_lean is too coarse for the attention of layers 0 (" in x for x in report.warnings)


def test_engines_get_no_format_without_a_kernel(checkpoint_folder, tmp_path):
    with pytest.raises(MoecError, match="--kv fp32 is for the CPU only"):
        build(checkpoint_folder, tmp_path / "bundle", kv="fp32", target="sm_80")
    assert budget.LADDER[-1] == "fp16"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kv": "mkv2", "kv_budget": 0.1}, "--kv-budget is for --kv auto"),
        ({"kv": "auto", "kv_budget": -1.0}, "a divergence is not negative"),
        ({"kv": "auto", "kv_budget": float("nan")}, "a divergence is not negative"),
        ({"kv": "int3"}, "--kv int3 is unknown"),
    ],
)
def test_mistakes(checkpoint_folder, tmp_path, options, message):
    with pytest.raises(MoecError, match=message):
        build(checkpoint_folder, tmp_path / "bundle", **options)


def test_an_engine_takes_int8(checkpoint_folder, tmp_path, text_file):
    """Its caches are engine inputs of int8 and of half precision, in the sizes of the layout."""
    need_tensorrt()
    build(
        checkpoint_folder, tmp_path / "bundle", kv="int8", calibration=text_file,
        context=256, batch=2, target="sm_80,sm_120",
    )  # fmt: skip
    manifest = open_bundle(tmp_path / "bundle").manifest
    (engine,) = manifest.engines
    assert engine["targets"] == ["sm_80", "sm_120"]
    assert (tmp_path / "bundle" / engine["file"]).stat().st_size > 1 << 20
    shapes = {entry["name"]: entry["shapes"][0] for entry in engine["bindings"]}
    for layer, layout in manifest.kv.items():
        assert layout.format == "int8"
        assert tuple(shapes[f"kv.{layer}.blocks"]) == layout.blocks_shape(2)
        assert tuple(shapes[f"kv.{layer}.ring"]) == layout.ring_shape(2)
