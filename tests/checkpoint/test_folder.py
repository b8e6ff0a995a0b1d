"""Opening checkpoints: parameters against transformers' own loading, and every kind of bad folder."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from moec.checkpoint import open_checkpoint
from moec.errors import MoecError
from tests.helpers.captured import checkpoint
from tests.helpers.synthetic import qwen3_config, synthetic_checkpoint
from tests.helpers.tiny import tiny_checkpoint

FAMILIES = ("qwen2_moe", "mixtral", "gpt_oss", "deepseek_v3", "granitemoe", "ernie4_5_moe")


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_equal_those_that_transformers_loads(family):
    ckpt = checkpoint(family)
    state = ckpt.load_torch().state_dict()
    assert sorted(ckpt.param_names()) == sorted(state)
    for name, tensor in state.items():
        array = ckpt.param(name)
        assert array.shape == ckpt.shape(name)
        np.testing.assert_array_equal(array.astype(np.float32), tensor.numpy(), err_msg=name)


@pytest.mark.parametrize("family", FAMILIES)
def test_one_expert_is_a_slice_of_the_whole(family):
    ckpt = checkpoint(family)
    stacked = [n for n in ckpt.param_names() if len(ckpt.shape(n)) == 3]
    assert stacked
    for name in stacked:
        whole = ckpt.param(name)
        for expert in (0, len(whole) - 1):
            np.testing.assert_array_equal(ckpt.expert(name, expert), whole[expert])


def test_bf16_stays_bf16_and_mapped_where_nothing_is_converted():
    array = checkpoint("qwen2_moe").param("model.embed_tokens.weight")
    assert array.dtype.name == "bfloat16"
    assert not array.flags.writeable


def test_tied_parameters_have_one_source():
    ckpt = checkpoint("qwen2_moe")
    assert ckpt.canonical("lm_head.weight") == "model.embed_tokens.weight"
    assert np.array_equal(ckpt.param("lm_head.weight"), ckpt.param("model.embed_tokens.weight"))


def test_shards_are_found_by_their_index(tmp_path):
    path = tiny_checkpoint(tmp_path / "m", tokenizer=False, max_shard_size="100KB")
    assert len(list(path.glob("*.safetensors"))) > 2
    ckpt = open_checkpoint(path)
    name = "model.layers.1.mlp.experts.down_proj"
    assert np.array_equal(ckpt.param(name), checkpoint("qwen2_moe").param(name))


def test_text_and_tokenizer_files(tmp_path):
    path = tiny_checkpoint(tmp_path / "m")
    ckpt = open_checkpoint(path)
    assert json.loads(ckpt.text_files["config.json"])["model_type"] == "qwen2_moe"
    assert "generation_config.json" in ckpt.text_files
    assert {"tokenizer.json", "tokenizer_config.json"} <= {p.name for p in ckpt.tokenizer_files()}


def test_skeleton_costs_no_memory_and_has_real_buffers():
    ckpt = checkpoint("gpt_oss")
    skeleton, real = ckpt.skeleton(), ckpt.load_torch()
    assert {n: p.shape for n, p in skeleton.named_parameters()} == {
        n: p.shape for n, p in real.named_parameters()
    }
    assert all(p.untyped_storage().nbytes() <= 4 for p in skeleton.parameters())
    for name, buffer in real.named_buffers():
        assert torch.equal(dict(skeleton.named_buffers())[name], buffer), name


@pytest.fixture
def folder(tmp_path) -> Path:
    """A copy of a good checkpoint to be damaged."""
    return Path(shutil.copytree(checkpoint("qwen2_moe").path, tmp_path / "model"))


def _fails(path, *words: str) -> None:
    with pytest.raises(MoecError) as info:
        open_checkpoint(path)
    text = str(info.value)
    assert all(w in text for w in words), text
    assert "Traceback" not in text


def _config(folder: Path, **changes) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_missing_folder(tmp_path):
    _fails(tmp_path / "nowhere", "does not exist", "nowhere")


def test_the_name_of_a_model_is_no_folder():
    _fails(
        "Some-Org/Model-8x7B.v2", "does not exist", "hf download Some-Org/Model-8x7B.v2 --local-dir FOLDER"
    )


def test_a_file_is_no_folder(tmp_path):
    (tmp_path / "f").write_text("x")
    _fails(tmp_path / "f", "not a checkpoint folder")


def test_missing_config(folder):
    (folder / "config.json").unlink()
    _fails(folder, "no config.json")


def test_config_that_is_not_json(folder):
    (folder / "config.json").write_text("{,")
    _fails(folder, "config.json", "JSON")


def test_config_that_is_no_object(folder):
    (folder / "config.json").write_text("[1]")
    _fails(folder, "model_type")


def test_unknown_model_type(folder):
    _config(folder, model_type="perceptron9000")
    _fails(folder, "perceptron9000")


def test_model_type_without_a_causal_language_model(folder):
    _config(folder, model_type="vit")
    _fails(folder, "vit", "causal language model")


def test_config_with_a_bad_field(folder):
    _config(folder, hidden_size="many")
    _fails(folder, "qwen2_moe")


def test_dense_model(tmp_path):
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(vocab_size=64, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                         num_attention_heads=2, num_key_value_heads=1)  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "dense")
    _fails(tmp_path / "dense", "llama", "Mixture-of-Experts")


def test_quantized_checkpoint(folder):
    _config(folder, quantization_config={"quant_method": "gptq"})
    _fails(folder, "already quantized", "gptq")


def test_no_weights(folder):
    (folder / "model.safetensors").unlink()
    _fails(folder, "safetensors")


@pytest.mark.parametrize("keep", [4, 500, -1000])
def test_truncated_weights(folder, keep):
    path = folder / "model.safetensors"
    data = path.read_bytes()
    path.write_bytes(data[:keep])
    _fails(folder, "model.safetensors")


def test_corrupt_header(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[20:60] = b"\xff" * 40
    path.write_bytes(data)
    _fails(folder, "corrupt")


def test_missing_tensor_is_named(tmp_path):
    path = tiny_checkpoint(tmp_path / "m", tokenizer=False, max_shard_size="100KB")
    index = json.loads((path / "model.safetensors.index.json").read_text())
    shard = index["weight_map"]["model.layers.1.mlp.gate.weight"]
    index["weight_map"] = {k: v for k, v in index["weight_map"].items() if v != shard}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    _fails(path, "lacks")


def test_missing_shard(tmp_path):
    path = tiny_checkpoint(tmp_path / "m", tokenizer=False, max_shard_size="100KB")
    shard = sorted(path.glob("*.safetensors"))[1]
    shard.unlink()
    _fails(path, shard.name)


def test_index_must_stay_in_the_folder(tmp_path):
    path = tiny_checkpoint(tmp_path / "m", tokenizer=False, max_shard_size="100KB")
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../x.safetensors"}}))
    _fails(path, "outside")


def test_index_without_a_map(tmp_path):
    path = tiny_checkpoint(tmp_path / "m", tokenizer=False, max_shard_size="100KB")
    (path / "model.safetensors.index.json").write_text("[]")
    _fails(path, "weight_map")


def test_reading_a_large_checkpoint_keeps_memory_small(tmp_path, monkeypatch):
    folder = synthetic_checkpoint(tmp_path / "model", qwen3_config(256, 128, 16, 4, 1024))
    monkeypatch.setattr("moec.checkpoint.folder._MAPPED_BYTES", 1 << 20)
    ckpt, name = open_checkpoint(folder), "model.layers.{}.mlp.experts.gate_up_proj"
    first = ckpt.param("model.embed_tokens.weight")
    copy, most = first.copy(), 0
    for layer in range(4):
        for expert in range(16):
            ckpt.expert(name.format(layer), expert)
            most = max(most, resident_bytes(folder))
    assert 0 < most < 4 << 20  # of 13 MB; Linux maps a little around what is read
    np.testing.assert_array_equal(first, copy)  # views outlive the release


def resident_bytes(folder) -> int:
    """Bytes of the folder's files that are in this process's memory."""
    total, ours = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if "-" in line.split(" ")[0]:
            ours = str(folder) in line
        elif ours and line.startswith("Rss:"):
            total += 1024 * int(line.split()[1])
    return total


def test_the_language_model_of_a_multimodal_checkpoint(tmp_path):
    """Llama 4 as it is published: text and vision, names with a prefix."""
    import transformers
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    from tests.helpers.tiny import tiny_config

    text = tiny_config("llama4_text", num_experts_per_tok=1).to_dict()
    sizes = dict(hidden_size=32, intermediate_size=32, num_attention_heads=2, patch_size=8, image_size=16)
    vision = dict(sizes, num_hidden_layers=1, vision_output_dim=32)
    vision |= dict(projector_input_dim=32, projector_output_dim=32)
    config = CONFIG_MAPPING["llama4"](text_config=text, vision_config=vision)
    model = transformers.Llama4ForConditionalGeneration(config)
    model.save_pretrained(tmp_path)
    ckpt = open_checkpoint(tmp_path)
    assert ckpt.config.model_type == "llama4_text"
    assert not any("vision" in name for name in ckpt.param_names())
    want = model.state_dict()["language_model.model.layers.1.self_attn.q_proj.weight"].numpy()
    np.testing.assert_array_equal(ckpt.param("model.layers.1.self_attn.q_proj.weight"), want)
    assert ckpt.expert("model.layers.0.feed_forward.experts.down_proj", 1).shape == (96, 128)
