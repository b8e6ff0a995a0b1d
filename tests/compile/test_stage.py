"""The engine stage on a real (tiny) model: real rewritten graph, real packed files."""

import json
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import save_file

from moec.bundle.geometry import Geometry
from moec.calibrate.run import neutral
from moec.checkpoint import open_checkpoint
from moec.compile.memory_plan import check_recorded, from_json, to_json
from moec.compile.stage import build_engines
from moec.compile.targets import RTX_TARGETS, Targets
from moec.errors import MoecError
from moec.frontend import capture
from moec.pack.experts_store import open_experts, write_experts
from moec.pack.graph_weights import plans_for
from moec.pack.weights import write_weights
from moec.reference.kv_layout import KVLayout
from moec.rewrite import RewriteContext, run
from moec.rewrite.pipeline import CPU_PASSES, MOEC_PASSES
from tests.helpers.bundles import _FOLDER, checkpoint
from tests.helpers.trt_engine import need_tensorrt

BATCH, CONTEXT, CHUNK = 3, 256, 32
RTX = Targets({"tensorrt_rtx": RTX_TARGETS})


def save_calibration(tensors, folder):
    arrays = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    save_file(arrays, folder / "calibration.safetensors")


def packed(weights: str = "int4"):
    """(rewritten model, geometry, layouts, folder with the packed files), made once."""
    return _packed(weights)


def engine(weights: str = "int4"):
    """The engine of `packed(weights)`, built once."""
    need_tensorrt()
    return _engine(weights)


@cache
def _packed(weights: str):
    ckpt = open_checkpoint(checkpoint("qwen2_moe"))
    captured = capture(ckpt, BATCH, CONTEXT)
    geometry: Geometry = captured.geometry
    layouts = {
        a.layer: KVLayout("mkv2", a.num_kv_heads, a.k_dim, a.v_dim, CONTEXT, a.window)
        for a in geometry.attention
    }
    context = RewriteContext(geometry, layouts, weights, "int4", "int8")
    run(captured.model, context, passes=MOEC_PASSES)
    rewritten = captured.model.clone()
    run(captured.model, context, passes=CPU_PASSES)
    folder = Path(_FOLDER.name) / f"engine-stage-{weights}"
    folder.mkdir()
    write_weights(folder / "weights.safetensors", plans_for(captured.model, ckpt.shape), ckpt)
    write_experts(folder / "experts.moex", geometry, ckpt, "int4")
    save_calibration(neutral(layouts), folder)
    return rewritten, geometry, layouts, folder


@cache
def _engine(weights: str):
    rewritten, _, _, folder = packed(weights)
    (built,) = build_engines(rewritten, folder, RTX, batch=BATCH, chunk=CHUNK)
    return built


@pytest.mark.parametrize("weights", ["int4", "bf16"])
def test_the_engine_has_the_model_s_layers(weights):
    built, (_, geometry, _, folder) = engine(weights), packed(weights)
    for profile in built.report.profiles:
        assert profile.plugin_layers["AsymKVAttention"] == len(geometry.attention)
        assert profile.plugin_layers["PipelinedMoE"] == len(geometry.moe)
        assert profile.copies == ()
    assert (folder / "engine.plan").stat().st_size == built.report.plan_bytes


def test_the_binding_table_is_what_the_engine_records():
    built = engine()
    assert {b.name for b in built.bindings} == {t.name for t in built.report.bindings}
    check_recorded(built.bindings, built.report.bindings)


@pytest.mark.parametrize("change", ["missing", "shape", "dtype"])
def test_a_wrong_binding_is_found(change):
    built = engine()
    recorded = list(built.report.bindings)
    if change == "missing":
        recorded = [tensor for tensor in recorded if tensor.name != "kv.0.ring"]
    else:
        index = next(i for i, tensor in enumerate(recorded) if tensor.name == "kv.0.ring")
        new = {"dtype": "Float"} if change == "dtype" else {"shapes": ((1, 2), (1, 2))}
        recorded[index] = replace(recorded[index], **new)
    with pytest.raises(MoecError, match="does not fit the engine") as error:
        check_recorded(built.bindings, recorded)
    assert "kv.0.ring" in str(error.value)


def test_weight_bindings_point_at_the_stored_bytes():
    built, (_, _, _, folder) = engine(), packed()
    weights = [b for b in built.bindings if b.source == "weights"]
    assert len(weights) > 20
    data = (folder / "weights.safetensors").read_bytes()
    with safe_open(folder / "weights.safetensors", "np") as file:
        for binding in weights:
            part = data[binding.place.offset : binding.place.offset + binding.place.nbytes]
            assert part == file.get_tensor(binding.name).tobytes()


def test_expert_and_calibration_bindings_point_at_their_bytes():
    built, (_, geometry, layouts, folder) = engine(), packed()
    table = {b.name: b for b in built.bindings}
    store = open_experts(folder / "experts.moex")
    data = (folder / "experts.moex").read_bytes()
    for moe in geometry.moe:
        place = table[f"moe.{moe.layer}.experts"].place
        assert data[place.offset : place.offset + place.nbytes] == store.layer(moe.layer).tobytes()
    data = (folder / "calibration.safetensors").read_bytes()
    for name, array in neutral(layouts).items():
        place = table[name].place
        assert data[place.offset : place.offset + place.nbytes] == np.ascontiguousarray(array).tobytes()


def test_shapes_are_those_of_the_profiles():
    built, (_, _, layouts, _) = engine(), packed()
    table = {b.name: b for b in built.bindings}
    assert table["input_ids"].shapes == ((BATCH, 1), (1, CHUNK))
    assert table["lengths"].shapes == ((BATCH,), (BATCH,))
    assert table["logits"].shapes == ((BATCH, 512), (1, 512))
    assert table["kv.1.ring"].shapes[0] == layouts[1].ring_shape(BATCH)
    assert table["kv.1.ring.out"].alias_of == "kv.1.ring"
    assert table["kv.1.ring"].nbytes == 2 * np.prod(layouts[1].ring_shape(BATCH))


def test_memory_adds_up():
    built, (_, _, layouts, folder) = engine(), packed()
    memory = built.memory
    assert memory.cache == sum(layout.bytes_allocated(BATCH) for layout in layouts.values())
    assert memory.experts == sum(b.place.nbytes for b in built.bindings if b.source == "store")
    assert memory.weights >= 0.9 * (folder / "weights.safetensors").stat().st_size
    assert memory.activations == max(p.activation_bytes for p in built.report.profiles)
    parts = (memory.weights, memory.experts, memory.cache, memory.calibration, memory.request, memory.result)
    assert memory.total == sum(parts) + memory.activations


def test_the_tables_survive_json():
    built = engine()
    tree = json.loads(json.dumps(built.to_manifest()))
    assert from_json(tree["bindings"]) == list(built.bindings)
    assert tree["targets"] == list(RTX_TARGETS)
    assert tree["file"] == "engine.plan"
    assert json.loads(json.dumps(to_json(built.bindings))) == tree["bindings"]
    report = json.loads(json.dumps(built.to_report()))
    assert report["profiles"][1]["plugin_layers"]["AsymKVAttention"] == 2


def test_the_cpu_target_builds_nothing(tmp_path):
    assert build_engines(packed()[0], tmp_path, Targets({}), batch=1) == []


def test_dumps_are_kept_and_no_log_is_left_in_the_bundle(tmp_path):
    need_tensorrt()
    rewritten, _, _, folder = packed()
    build_engines(rewritten, folder, RTX, batch=BATCH, chunk=CHUNK, dump_dir=tmp_path / "dump")
    assert sorted(path.name for path in (tmp_path / "dump").iterdir()) == ["engine.log", "lowered.onnx"]
    names = {"calibration.safetensors", "engine.plan", "experts.moex", "weights.safetensors"}
    assert {path.name for path in folder.iterdir()} == names


def test_a_failure_keeps_the_log_where_the_message_says():
    need_tensorrt()
    rewritten, _, _, folder = packed()
    broken = rewritten.clone()
    next(n for n in broken.graph if n.op_type == "AsymKVAttention").attributes.pop("sink_tokens")
    with pytest.raises(MoecError, match="attribute 'sink_tokens' is missing") as error:
        build_engines(broken, folder, RTX, batch=BATCH, chunk=CHUNK)
    log = Path(str(error.value).split("Full log: ")[1].strip())
    assert "sink_tokens" in log.read_text()
    for path in log.parent.iterdir():
        path.unlink()
    log.parent.rmdir()


def test_files_that_do_not_fit_the_graph_are_named(tmp_path):
    rewritten, _, layouts, folder = packed()
    for name in ("weights.safetensors", "experts.moex"):
        (tmp_path / name).symlink_to(folder / name)
    tensors = neutral(layouts)
    tensors["kv.1.k_ref"] = np.ones((2, 2), np.float32)
    save_calibration(tensors, tmp_path)
    with pytest.raises(MoecError, match=r"calibration\.safetensors has 16 bytes") as error:
        build_engines(rewritten, tmp_path, RTX, batch=BATCH, chunk=CHUNK)
    assert "kv.1.k_ref" in str(error.value)
