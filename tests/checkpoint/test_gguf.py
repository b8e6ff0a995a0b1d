"""GGUF models against the transformers models that they were written from."""

from __future__ import annotations

import json

import gguf
import ml_dtypes
import numpy as np
import pytest
import torch

from moec.checkpoint import open_checkpoint
from moec.errors import MoecError
from tests.helpers.gguf_model import ARCHITECTURES, tensors, write_gguf
from tests.helpers.rng import fresh_rng
from tests.helpers.tiny import tiny_model, tiny_tokenizer

BF16, Q8_0, Q4_K = (getattr(gguf.GGMLQuantizationType, name) for name in ("BF16", "Q8_0", "Q4_K"))
# Heads of 32 and shapes in whole blocks of 32.
SIZES = dict(moe_intermediate_size=64, shared_expert_intermediate_size=64)


def model_of(family: str, **overrides):
    rng = fresh_rng()
    sizes = SIZES | dict(norm_topk_prob=family == "qwen3_moe") if family.startswith("qwen") else {}
    if family == "minimax_m2":  # as released: half of each head is rotated
        sizes = dict(rope_parameters=dict(rope_type="default", rope_theta=5e6, partial_rotary_factor=0.5))
    model = tiny_model(family, int(rng.integers(1 << 30)), **sizes, **overrides)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.from_numpy(rng.standard_normal(buffer.shape)))
    return model


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_parameters_are_those_of_the_model(family, tmp_path):
    model = model_of(family)
    ckpt = open_checkpoint(write_gguf(tmp_path / "model.gguf", model, BF16))
    state = model.state_dict()
    assert sorted(ckpt.param_names()) == sorted(state)
    for name, value in state.items():
        array = ckpt.param(name)
        np.testing.assert_array_equal(array.astype(np.float32), value.numpy(), err_msg=name)
        if value.dim() == 3:
            assert array.dtype == ml_dtypes.bfloat16
            np.testing.assert_array_equal(ckpt.expert(name, 3), array[3], err_msg=name)
        elif "experts" in name:
            np.testing.assert_array_equal(ckpt.expert(name, 1), array[1], err_msg=name)


@pytest.mark.parametrize("family", sorted(ARCHITECTURES))
def test_the_model_that_it_describes_computes_the_same(family, tmp_path):
    model = model_of(family)
    ckpt = open_checkpoint(write_gguf(tmp_path / "model.gguf", model, BF16))
    ids = torch.from_numpy(fresh_rng().integers(0, 512, (1, 20)))
    with torch.no_grad():
        want, got = model(ids).logits, ckpt.load_torch()(ids).logits
    torch.testing.assert_close(got, want, rtol=0, atol=1e-5 * float(want.abs().max()))


def test_quantized_experts_are_dequantized_one_at_a_time(tmp_path):
    model = model_of("qwen3_moe")
    ckpt = open_checkpoint(write_gguf(tmp_path / "model.gguf", model, Q8_0))
    source = tensors(model)
    parts = [source[f"blk.1.ffn_{n}_exps.weight"][2] for n in ("gate", "up")]
    want = [gguf.quants.dequantize(gguf.quants.quantize(p, Q8_0), Q8_0) for p in parts]
    got = ckpt.expert("model.layers.1.mlp.experts.gate_up_proj", 2)
    assert got.dtype == np.float32
    np.testing.assert_array_equal(got, np.concatenate(want))


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_the_tokenizer_comes_along(family, tmp_path):
    tokenizer = tiny_tokenizer()
    ckpt = open_checkpoint(write_gguf(tmp_path / "model.gguf", model_of(family), BF16, tokenizer))
    files = {path.name: path for path in ckpt.tokenizer_files()}
    assert "tokenizer.json" in files
    from transformers import AutoTokenizer

    found = AutoTokenizer.from_pretrained(ckpt.path)
    text = "Double, double toil and trouble; 42 cauldrons?"
    assert found(text).input_ids == tokenizer(text).input_ids
    assert json.loads(ckpt.text_files["config.json"])["model_type"] == family


def one_tensor_an_expert(found: dict) -> dict:
    """As llama.cpp wrote Mixtral before April 2024."""
    split = {}
    for name, array in found.items():
        stem, merged, _ = name.partition("_exps.weight")
        split |= {f"{stem}.{e}.weight": array[e] for e in range(len(array))} if merged else {name: array}
    return split


@pytest.mark.parametrize("qtype", [BF16, Q8_0])
def test_a_tensor_for_each_expert(tmp_path, monkeypatch, qtype):
    model = model_of("mixtral")
    merged = open_checkpoint(write_gguf(tmp_path / "merged.gguf", model, qtype))
    split = one_tensor_an_expert(tensors(model))
    assert "blk.1.ffn_down.7.weight" in split
    monkeypatch.setattr("tests.helpers.gguf_model.tensors", lambda _: split)
    ckpt = open_checkpoint(write_gguf(tmp_path / "old.gguf", model, qtype))
    for name in merged.param_names():
        np.testing.assert_array_equal(ckpt.param(name), merged.param(name), err_msg=name)
    name = "model.layers.1.mlp.experts.gate_up_proj"
    np.testing.assert_array_equal(ckpt.expert(name, 3), merged.expert(name, 3))


def test_an_expert_without_a_tensor_is_a_missing_tensor(tmp_path, monkeypatch):
    model = model_of("mixtral")
    split = one_tensor_an_expert(tensors(model))
    del split["blk.0.ffn_up.3.weight"]
    monkeypatch.setattr("tests.helpers.gguf_model.tensors", lambda _: split)
    path = write_gguf(tmp_path / "model.gguf", model, BF16)
    with pytest.raises(MoecError, match=r"no tensor for model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        open_checkpoint(path)


def test_shards_are_found(tmp_path):
    whole = write_gguf(tmp_path / "m.gguf", model_of("qwen3_moe"), BF16)
    shard = whole.rename(tmp_path / "m-00001-of-00002.gguf")
    with pytest.raises(MoecError, match="shard of the GGUF model is missing"):
        open_checkpoint(shard)


def test_what_is_wrong_is_said(tmp_path):
    broken = tmp_path / "broken.gguf"
    broken.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(MoecError, match=r"cannot be read|not supported"):
        open_checkpoint(broken)
    writer = gguf.GGUFWriter(tmp_path / "dense.gguf", "gemma2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(MoecError, match="'gemma2' is not supported"):
        open_checkpoint(tmp_path / "dense.gguf")


def test_a_missing_tensor_is_named(tmp_path, monkeypatch):
    model = model_of("qwen3_moe")
    kept = {n: a for n, a in tensors(model).items() if n != "blk.1.ffn_up_exps.weight"}
    monkeypatch.setattr("tests.helpers.gguf_model.tensors", lambda _: kept)
    path = write_gguf(tmp_path / "model.gguf", model, BF16)
    with pytest.raises(MoecError, match=r"no tensor for model\.layers\.1\.mlp\.experts\.gate_up_proj"):
        open_checkpoint(path)
