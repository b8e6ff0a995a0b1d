"""`--plan-only`: what it says is what the real build makes."""

from __future__ import annotations

import shutil
from dataclasses import asdict

import onnx
import pytest

from moec.builder import build
from moec.bundle.reader import open_bundle
from moec.cli.main import execute
from moec.errors import MoecError
from moec.runtime.loading import load
from tests.helpers.trt_engine import need_tensorrt


@pytest.fixture(scope="module")
def only_config(checkpoint_folder, tmp_path_factory):
    """A folder with config.json and nothing else."""
    folder = tmp_path_factory.mktemp("plan") / checkpoint_folder.name
    folder.mkdir()
    shutil.copyfile(checkpoint_folder / "config.json", folder / "config.json")
    return folder


@pytest.fixture(scope="module")
def plan(only_config, tmp_path_factory):
    path = tmp_path_factory.mktemp("plan-only") / "plan"
    return build(only_config, path, context=256, batch=2, plan_only=True, target="cpu")


@pytest.fixture(scope="module")
def full(plan, checkpoint_folder, text_file, tmp_path_factory):
    """The bundle that is made by the command that a plan names."""
    bundle = tmp_path_factory.mktemp("full") / "bundle"
    shutil.copytree(plan.path, bundle)
    with pytest.raises(MoecError) as raised:
        open_bundle(bundle)
    command = raised.value.hint.partition("moec ")[2].replace("CHECKPOINT", str(checkpoint_folder))
    assert execute([*command.split(), "--calibration", str(text_file)]) == 0
    return bundle


def initializers(path) -> dict[str, tuple]:
    graph = onnx.load(path / "model.onnx", load_external_data=False).graph
    return {
        i.name: (i.data_type, tuple(i.dims), {e.key: e.value for e in i.external_data})
        for i in graph.initializer
    }


def test_a_plan_has_the_places_of_the_real_weights(plan, full):
    assert initializers(plan.path) == initializers(full)
    assert not list(plan.path.glob("*.moex"))
    assert not (plan.path / "weights.safetensors").exists()


def test_a_plan_has_the_manifest_of_the_real_bundle(plan, full):
    planned, real = (open_bundle(p, plan=True).manifest for p in (plan.path, full))
    assert (planned.plan, real.plan) == (True, False)
    for name in ("geometry", "kv", "inputs", "outputs", "context", "batch"):
        assert getattr(planned, name) == getattr(real, name), name
    assert asdict(planned.model) == asdict(real.model)
    for name in ("dense", "vocabulary", "experts", "cache_slot", "total_bf16"):
        assert planned.sizes[name] == real.sizes[name], name


def test_a_plan_does_not_run_and_says_how_to_add_weights(plan):
    with pytest.raises(MoecError, match="is a plan") as raised:
        load(plan.path)
    assert f"moec build CHECKPOINT -o {plan.path} --context 256 --batch 2 --kv mkv2" in raised.value.hint


def test_auto_formats_need_weights(only_config, tmp_path):
    with pytest.raises(MoecError, match="--plan-only has no weights"):
        build(only_config, tmp_path / "b", kv="auto", plan_only=True)


def test_without_the_option_weights_are_needed(only_config, tmp_path):
    with pytest.raises(MoecError, match=r"no \*\.safetensors"):
        build(only_config, tmp_path / "b")


@pytest.mark.slow
def test_the_engine_of_a_plan_is_that_of_the_real_bundle(only_config, checkpoint_folder, text_file, tmp_path):
    need_tensorrt()
    options = dict(context=256, batch=2, target="sm_89")
    planned = build(only_config, tmp_path / "plan", plan_only=True, **options)
    real = build(checkpoint_folder, tmp_path / "real", calibration=text_file, **options)
    a, b = (open_bundle(r.path, plan=True).manifest.engines[0] for r in (planned, real))
    assert a["sha256"] == b["sha256"]
    assert a["memory"] == b["memory"]
