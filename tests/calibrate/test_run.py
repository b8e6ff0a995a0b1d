"""The calibrator against keys computed by hand, and its behaviour around the model run."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moec.bundle.geometry import AttentionLayer, Geometry
from moec.calibrate import calibrate, neutral
from moec.calibrate.text import divide, read_text, tokenize, windows
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
    seen = []
    got = calibrate(
        open_checkpoint(folder), geometry(), layouts("mkv2", "mkv2"), [text_file], lambda *x: seen.append(x)
    )
    assert seen == [(1, 2), (2, 2)]
    fitted, _ = divide(tokenize(folder, read_text([text_file])))
    cut = windows(fitted, 512, 512)
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
    monkeypatch.setattr(checkpoint, "skeleton", lambda **_: pytest.fail("the model was made"))
    got = calibrate(checkpoint, geometry(), layouts("fp16", "fp32"))
    assert got.keys() == neutral(layouts("fp16", "fp32")).keys()


@torch.no_grad()
def test_int8_references_leave_room_above_the_largest_amplitude(folder, text_file):
    got = calibrate(open_checkpoint(folder), geometry(), layouts("int8", "mkv2"), [text_file])
    assert got["kv.0.k_order"].tolist() == [list(range(64))] * 2
    fitted, _ = divide(tokenize(folder, read_text([text_file])))
    model = tiny_model(seed=5)
    k = np.concatenate(
        [keys_by_hand(model, torch.from_numpy(w))[:, 16:464] for w in windows(fitted, 512, 512)], 1
    )
    stored = np.abs(k - got["kv.0.k_mean"][:, None]).max(1) / got["kv.0.k_ref"]
    assert ((stored >= 11) & (stored <= 23)).all()  # 16 to the nearest power of two


def test_nan_names_the_layer(folder, text_file, monkeypatch):
    checkpoint = open_checkpoint(folder)
    healthy = checkpoint.param

    def param(name):
        broken = name == "model.layers.1.self_attn.k_proj.weight"
        return healthy(name) * np.float32(np.nan) if broken else healthy(name)

    monkeypatch.setattr(checkpoint, "param", param)
    with pytest.raises(MoecError, match="layer 1"):
        calibrate(checkpoint, geometry(), layouts("mkv2", "mkv2"), [text_file])
