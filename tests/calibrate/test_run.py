"""The calibrator against keys computed by hand, and its behaviour around the model run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moec.bundle.geometry import AttentionLayer, Geometry
from moec.calibrate import calibrate, neutral
from moec.calibrate.run import check_memory
from moec.checkpoint import open_checkpoint
from moec.errors import MoecError
from moec.reference.kv_layout import KVLayout
from tests.helpers.tiny import shakespeare, tiny_checkpoint, tiny_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("calibrate") / "model", seed=5)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(shakespeare(3000), encoding="utf-8")
    return path


def geometry(**options) -> Geometry:
    layers = tuple(AttentionLayer(i, 4, 2, 64, 64, 0.125, **options) for i in range(2))
    return Geometry("qwen2_moe", 512, 128, 1024, layers, ())


def layouts(*formats: str) -> dict[int, KVLayout]:
    return {i: KVLayout(f, 2, 64, 64, 512) for i, f in enumerate(formats)}


def keys_by_hand(model, ids: torch.Tensor) -> np.ndarray:
    """Layer 0's keys after RoPE, `[Hkv, S, 64]`, in NumPy from the weights."""
    layer = model.model.layers[0]
    x = model.model.embed_tokens.weight[ids].numpy().astype(np.float64)
    x = x / np.sqrt(np.square(x).mean(-1, keepdims=True) + model.config.rms_norm_eps)
    x = x * layer.input_layernorm.weight.numpy()
    k = x @ layer.self_attn.k_proj.weight.numpy().T + layer.self_attn.k_proj.bias.numpy()
    k = k.reshape(len(ids), 2, 64).transpose(1, 0, 2)
    theta = model.config.rope_parameters["rope_theta"]
    angle = np.arange(len(ids))[:, None] / theta ** (np.arange(0, 64, 2) / 64)
    cos, sin = np.cos(angle), np.sin(angle)
    a, b = k[..., :32], k[..., 32:]
    return np.concatenate([a * cos - b * sin, b * cos + a * sin], -1)


@torch.no_grad()
def test_the_mean_is_that_of_keys_after_rope(folder, text_file):
    from moec.calibrate.text import read_text, tokenize, windows

    seen = []
    got = calibrate(
        open_checkpoint(folder), geometry(), layouts("mkv2", "mkv2"), [text_file], lambda *x: seen.append(x)
    )
    cut = windows(tokenize(folder, read_text([text_file])), 512, 512)
    assert seen == [(i + 1, len(cut)) for i in range(len(cut))]
    model = tiny_model(seed=5)
    k = np.stack([keys_by_hand(model, torch.from_numpy(w))[:, 16 : 16 + 7 * 64] for w in cut])
    order = got["kv.0.k_order"].astype(np.int64)
    want = np.take_along_axis(k.mean((0, 2)), order, -1)
    np.testing.assert_allclose(got["kv.0.k_mean"], want, atol=1e-4)
    spread = np.ptp(k.reshape(len(cut), 2, 7, 64, 64), axis=3)
    typical = np.take_along_axis(np.sqrt(np.square(spread).mean((0, 2))), order, -1)
    typical *= np.where(np.arange(64) < 16, 1 / 15, 0.8 / 3)
    assert np.all(np.abs(np.log2(got["kv.0.k_ref"] / typical)) <= 0.51)


def test_dtypes_shapes_and_determinism(folder, text_file):
    got, again = (
        calibrate(open_checkpoint(folder), geometry(), layouts("mkv2", "fp16"), [text_file]) for _ in range(2)
    )
    assert {k: (v.dtype.name, v.shape) for k, v in got.items() if ".0." in k} == {
        "kv.0.k_mean": ("float32", (2, 64)),
        "kv.0.k_ref": ("float32", (2, 64)),
        "kv.0.k_order": ("int32", (2, 64)),
        "kv.0.v_ref": ("float32", (2, 1)),
    }
    plain = neutral(layouts("fp16", "fp16"))
    for name, value in got.items():
        np.testing.assert_array_equal(value, again[name] if ".0." in name else plain[name])


def test_soft_capped_layers_are_not_centred(folder, text_file):
    got = calibrate(open_checkpoint(folder), geometry(softcap=30.0), layouts("mkv2", "mkv2"), [text_file])
    assert not got["kv.1.k_mean"].any()
    assert (got["kv.1.k_ref"] != 1).any()


def test_nothing_runs_without_quantized_layers(folder, monkeypatch):
    checkpoint = open_checkpoint(folder)
    monkeypatch.setattr(checkpoint, "load_torch", lambda **_: pytest.fail("the model was loaded"))
    got = calibrate(checkpoint, geometry(), layouts("fp16", "fp32"))
    assert got.keys() == neutral(layouts("fp16", "fp32")).keys()


def test_nan_names_the_layer(tmp_path, text_file):
    path = tiny_checkpoint(tmp_path / "model")
    checkpoint = open_checkpoint(path)
    broken = checkpoint.load_torch

    def load(**options):
        model = broken(**options)
        model.model.layers[1].self_attn.k_proj.weight.data[3] = torch.nan
        return model

    checkpoint.load_torch = load
    with pytest.raises(MoecError, match="layer 1"):
        calibrate(checkpoint, geometry(), layouts("mkv2", "mkv2"), [text_file])


def test_too_little_memory_is_said_before_the_model_loads(folder, tmp_path):
    checkpoint, meminfo = open_checkpoint(folder), tmp_path / "meminfo"
    meminfo.write_text("MemTotal: 9999999 kB\nMemAvailable: 2000 kB\n")
    with pytest.raises(MoecError, match=r"needs 0\.0 GB of memory, 0\.0 GB are available"):
        check_memory(checkpoint, meminfo)
    meminfo.write_text("MemTotal: 9999999 kB\nMemAvailable: 20000 kB\n")
    check_memory(checkpoint, meminfo)
    check_memory(checkpoint, tmp_path / "missing")
