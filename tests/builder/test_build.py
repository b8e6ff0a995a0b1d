"""A whole build: every file against the checkpoint, and the running bundle against transformers."""

from __future__ import annotations

import json

import numpy as np
import onnx
import pytest
import safetensors.numpy
import safetensors.torch
import torch

import moec
from moec.builder import build
from moec.bundle.reader import open_bundle
from moec.checkpoint import open_checkpoint
from moec.native import find_library
from moec.pack.experts_store import blob_layout, open_experts
from moec.progress import Progress
from moec.reference.experts import unpack_expert
from moec.reference.kv_layout import KVLayout
from moec.reference.weights import dequantize_int4, dequantize_int8
from tests.helpers.decided import draw
from tests.helpers.graphs import reference_logits
from tests.helpers.rng import fresh_rng
from tests.helpers.tiny import tiny_checkpoint, tiny_model


@pytest.fixture(scope="module")
def built(checkpoint_folder, text_file, tmp_path_factory):
    folder = tmp_path_factory.mktemp("built")
    progress = Progress()
    report = build(
        checkpoint_folder, folder / "bundle", context=256, batch=2, calibration=text_file,
        dump_dir=folder / "dump", progress=progress,
    )  # fmt: skip
    return report, open_bundle(folder / "bundle"), folder


EIGHT_BITS = ("embed_tokens.weight", "k_proj.weight", "v_proj.weight", "o_proj.weight", "down_proj.weight")


def tensors(bundle) -> dict[str, np.ndarray]:
    loaded = safetensors.torch.load_file(bundle.file("weights.safetensors"))
    return {
        name: value.float().numpy() if value.dtype == torch.bfloat16 else value.numpy()
        for name, value in loaded.items()
    }


def test_the_manifest_says_what_was_built(built):
    report, bundle, _ = built
    manifest = bundle.manifest
    assert report.path == bundle.path
    assert (manifest.context, manifest.batch, manifest.weights_format, manifest.experts_format) == (
        256,
        2,
        "int4",
        "int4",
    )
    assert manifest.kv == {i: KVLayout("mkv2", 2, 64, 64, 256) for i in range(2)}
    assert manifest.tokenizer.eos_token_ids == (2, 3)
    assert manifest.tokenizer.bos_token_id == 0
    assert manifest.tokenizer.has_tokenizer
    assert manifest.tokenizer.has_chat_template
    assert manifest.generation == {"do_sample": True, "top_p": 0.9}
    assert manifest.model.name == "model"
    assert manifest.options["calibration"] == ["text.txt"]
    assert "build_report.json" not in manifest.files


def test_the_bindings_are_those_of_the_graph(built):
    _, bundle, _ = built
    graph = onnx.load(bundle.file("model.onnx"), load_external_data=False).graph
    for side, values in ((bundle.manifest.inputs, graph.input), (bundle.manifest.outputs, graph.output)):
        for binding, value in zip(side, values, strict=True):
            tensor = value.type.tensor_type
            assert binding.name == value.name
            assert binding.dtype == onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type).name
            assert list(binding.shape) == [d.dim_param or d.dim_value for d in tensor.shape.dim]
    shapes = {b.name: b.shape for b in bundle.manifest.inputs}
    assert shapes["kv.1.blocks"] == bundle.manifest.kv[1].blocks_shape(2)
    assert shapes["kv.0.ring"] == bundle.manifest.kv[0].ring_shape(2)
    assert {b.source for b in bundle.manifest.inputs} == {"request", "cache", "calibration", "store"}


def test_every_dense_weight_is_there_and_close(built, checkpoint_folder):
    _, bundle, _ = built
    stored, checkpoint = tensors(bundle), open_checkpoint(checkpoint_folder)
    names = {checkpoint.canonical(n) for n in checkpoint.param_names() if ".experts." not in n}
    packed = {n.removesuffix(".codes").removesuffix(".scales") for n in stored if not n.startswith(".pad")}
    router = {n for n in names if n.endswith("mlp.gate.weight")}
    assert packed | router == names
    for name in packed:
        want = checkpoint.param(name).astype(np.float32)
        got, bound = stored.get(name), 0.0
        if got is None:
            codes, scales = stored[f"{name}.codes"], stored[f"{name}.scales"]
            eight_bits = codes.shape[1] == 64 * scales.shape[1]
            assert eight_bits == name.endswith(EIGHT_BITS)
            dequantize, bound = (dequantize_int8, 0.01) if eight_bits else (dequantize_int4, 0.12)
            got = dequantize(codes, scales, want.shape[1])
        assert np.linalg.norm(got - want) <= bound * np.linalg.norm(want), name


def test_every_expert_is_there_and_close(built, checkpoint_folder):
    _, bundle, _ = built
    store, checkpoint = open_experts(bundle.file("experts.moex")), open_checkpoint(checkpoint_folder)
    for layer in bundle.manifest.geometry.moe:
        gate_up, down = (checkpoint.param(n).astype(np.float32) for n in (layer.gate_up, layer.down))
        for expert, blob in enumerate(store.layer(layer.layer)):
            got = unpack_expert(blob_layout(layer, "int4"), blob)
            for a, b in ((got.gate_up, gate_up[expert]), (got.down, down[expert])):
                assert np.linalg.norm(a - b) < 0.12 * np.linalg.norm(b)


def test_the_calibration_is_no_dummy(built, text_file):
    _, bundle, _ = built
    calibration = safetensors.numpy.load_file(bundle.file("calibration.safetensors"))
    assert set(calibration) == {
        f"kv.{i}.{n}" for i in (0, 1) for n in ("k_mean", "k_ref", "k_order", "v_ref")
    }
    assert calibration["kv.0.k_mean"].any()
    with safetensors.safe_open(bundle.file("calibration.safetensors"), "np") as file:
        assert json.loads(file.metadata()["texts"])[0]["name"] == text_file.name


def test_the_tokenizer_comes_along(built, checkpoint_folder):
    _, bundle, _ = built
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "config.json"):
        assert (bundle.path / name).read_bytes() == (checkpoint_folder / name).read_bytes()


def test_the_report(built):
    report, bundle, _ = built
    tree = json.loads((bundle.path / "build_report.json").read_text())
    assert {p["name"] for p in tree["passes"]} >= {"attention", "experts", "router", "dense"}
    assert all(p["applied"] for p in tree["passes"] if p["name"] in ("attention", "router"))
    assert tree["sizes"] == report.sizes
    assert next(iter(tree["seconds"])) == "Reading the checkpoint"
    assert str(bundle.path.parent) not in json.dumps(tree)
    assert str(bundle.path.parent) not in (bundle.path / "manifest.json").read_text()


def test_sizes_add_up(built):
    report, bundle, _ = built
    sizes, layouts = report.sizes, bundle.manifest.kv
    parts = ("dense", "vocabulary", "experts", "engine", "other")
    assert sizes["total"] == sum(sizes[part] for part in parts)
    assert sizes["cache_slot"] == sum(x.bytes_allocated(1) for x in layouts.values())
    assert sizes["cache_token"] == 2 * 2 * 2560 // 64
    assert sizes["cache_token_bf16"] == 2 * 2 * 128 * 2
    assert sizes["experts_bf16"] == 2 * 2 * 8 * 3 * 128 * 48


def test_the_dumps(built):
    _, _, folder = built
    names = sorted(p.name for p in (folder / "dump").iterdir())
    assert "exported.onnx" in names
    assert "01-attention.txt" in names
    onnx.checker.check_model(str(folder / "dump" / "exported.onnx"))


def test_a_build_repeats_bit_by_bit(built, checkpoint_folder, text_file, tmp_path):
    _, bundle, _ = built
    build(checkpoint_folder, tmp_path / "again", context=256, batch=2, calibration=[text_file])
    assert (tmp_path / "again" / "manifest.json").read_bytes() == (bundle.path / "manifest.json").read_bytes()


def test_a_checkpoint_without_tokenizer_builds_for_token_ids(tmp_path):
    model = tiny_checkpoint(tmp_path / "model", tokenizer=False)
    report = build(model, tmp_path / "bundle", context=64, kv="fp16")
    assert report.warnings == ["the checkpoint has no tokenizer: the bundle takes token ids only"]
    manifest = open_bundle(tmp_path / "bundle").manifest
    assert not manifest.tokenizer.has_tokenizer
    assert json.loads((tmp_path / "bundle" / "build_report.json").read_text())["warnings"] == report.warnings


@pytest.mark.skipif(find_library("moec_cpu") is None, reason="libmoec_cpu is not built")
def test_the_exact_bundle_gives_the_logits_of_transformers(checkpoint_folder, tmp_path):
    build(
        checkpoint_folder, tmp_path / "exact", context=128, batch=1, kv="fp32", weights="bf16", experts="bf16"
    )
    model = tiny_model(seed=11)
    (ids,) = draw(fresh_rng(), model, open_bundle(tmp_path / "exact").manifest.geometry, (), (100,))
    got = moec.load(tmp_path / "exact", device="cpu", threads=1).score(ids.tolist())
    want = reference_logits(model, ids, last=100)
    assert np.abs(got - want).max() < 1e-3
