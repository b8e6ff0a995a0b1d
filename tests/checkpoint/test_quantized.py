"""fp8 and mxfp4 checkpoints: arithmetic against transformers' own, and whole folders against bf16 ones."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from moec.checkpoint import open_checkpoint
from moec.checkpoint.quantized import block_scaled, mxfp4
from moec.errors import MoecError
from tests.helpers.rng import fresh_rng
from tests.helpers.tiny import tiny_checkpoint


def test_block_scales_equal_transformers():
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    rng = fresh_rng()
    codes = torch.from_numpy(rng.standard_normal((256, 384), np.float32)).to(torch.float8_e4m3fn)
    scale = torch.from_numpy(rng.uniform(0.01, 3, (2, 3)).astype(np.float32))
    want = Fp8Dequantize(None)._dequantize_one(codes, scale, torch.bfloat16)
    array = codes.view(torch.uint8).numpy().view(ml_dtypes.float8_e4m3fn)
    got = block_scaled(array, scale.numpy(), (128, 128))
    np.testing.assert_array_equal(got.view(np.uint16), want.view(torch.uint16).numpy())


def test_blocks_may_be_cut_at_the_edges():
    codes = np.ones((130, 3), ml_dtypes.float8_e4m3fn)
    got = block_scaled(codes, np.array([[2.0], [4.0]], np.float32), (128, 128)).astype(np.float32)
    assert (got[:128] == 2).all()
    assert (got[128:] == 4).all()


def test_a_scale_of_another_shape_is_named():
    codes = np.ones((4, 4), ml_dtypes.float8_e4m3fn)
    with pytest.raises(MoecError, match=r"layer\.weight has a scale of shape \(2, 1\)"):
        block_scaled(codes, np.ones((2, 1), np.float32), (128, 128), "layer.weight")


def test_mxfp4_equals_transformers():
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    rng = fresh_rng()
    blocks = rng.integers(0, 256, (3, 8, 2, 16), np.uint8)
    scales = rng.integers(110, 140, (3, 8, 2), np.uint8)
    want = convert_moe_packed_tensors(torch.from_numpy(blocks), torch.from_numpy(scales))
    got = np.swapaxes(mxfp4(blocks, scales), -1, -2)
    np.testing.assert_array_equal(got.astype(np.float32), want.float().numpy())


def _edit(path: Path, change, config: dict) -> None:
    """Rewrites a checkpoint's tensors, and gives its config a quantization."""
    file = path / "model.safetensors"
    save_file({k: v.contiguous() for k, v in change(load_file(file)).items()}, file, {"format": "pt"})
    tree = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(tree | {"quantization_config": config}))


def _to_fp8(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = dict(tensors)
    for name, value in tensors.items():
        if "proj" in name and value.dim() == 2:
            blocks = [-(-n // 128) for n in value.shape]
            scale = torch.rand(blocks) * 0.01 + 0.01
            full = scale.repeat_interleave(128, 0).repeat_interleave(128, 1)[
                : value.shape[0], : value.shape[1]
            ]
            out[name] = (value.float() / full).to(torch.float8_e4m3fn)
            out[f"{name}_scale_inv"] = scale
    return out


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
def test_fp8_checkpoint_is_close_to_the_original(family, tmp_path):
    path = tiny_checkpoint(tmp_path / "m", family, tokenizer=False)
    want = {n: open_checkpoint(path).param(n) for n in open_checkpoint(path).param_names()}
    _edit(path, _to_fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]})
    ckpt = open_checkpoint(path)
    assert set(ckpt.param_names()) == set(want)
    for name, array in want.items():
        got = ckpt.param(name)
        assert got.shape == array.shape
        error = np.abs(got.astype(np.float32) - array.astype(np.float32)).max()
        assert error <= 0.07 * np.abs(array.astype(np.float32)).max(), name
    name = next(n for n in want if n.endswith("experts.gate_up_proj"))
    np.testing.assert_array_equal(ckpt.expert(name, 3).view(np.uint16), ckpt.param(name)[3].view(np.uint16))


def _to_mxfp4(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    out = {}
    for name, value in tensors.items():
        if name.endswith(("experts.gate_up_proj", "experts.down_proj")):
            experts, columns, rows = value.shape
            out[f"{name}_blocks"] = torch.randint(
                0, 256, (experts, rows, columns // 32, 16), dtype=torch.uint8
            )
            scales = torch.randint(120, 126, (experts, rows, columns // 32), dtype=torch.uint8)
            out[f"{name}_scales"] = scales
        else:
            out[name] = value
    return out


def test_mxfp4_checkpoint_by_expert(tmp_path):
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    path = tiny_checkpoint(tmp_path / "m", "gpt_oss", tokenizer=False)
    _edit(path, _to_mxfp4, {"quant_method": "mxfp4", "modules_to_not_convert": []})
    ckpt, stored = open_checkpoint(path), load_file(path / "model.safetensors")
    for part in ("gate_up_proj", "down_proj"):
        name = f"model.layers.1.mlp.experts.{part}"
        want = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"]).float().numpy()
        np.testing.assert_array_equal(ckpt.param(name).astype(np.float32), want)
        np.testing.assert_array_equal(ckpt.expert(name, 5).astype(np.float32), want[5])
    model = ckpt.load_torch()
    np.testing.assert_array_equal(model.state_dict()[name].numpy(), want)


def test_other_quantizations_are_refused(tmp_path):
    path = tiny_checkpoint(tmp_path / "m", tokenizer=False)
    _edit(path, dict, {"quant_method": "awq", "bits": 4})
    with pytest.raises(MoecError, match="already quantized \\(awq\\)"):
        open_checkpoint(path)


def test_the_cache_of_hugging_face(tmp_path):
    """models--org--name: blobs, and snapshots of links to them; sharded."""
    plain = tiny_checkpoint(tmp_path / "plain", tokenizer=False, max_shard_size="300KB")
    root = tmp_path / "models--org--name"
    snapshot = root / "snapshots" / "0123abcd"
    snapshot.mkdir(parents=True)
    (root / "blobs").mkdir()
    for i, file in enumerate(sorted(plain.iterdir())):
        (root / "blobs" / str(i)).write_bytes(file.read_bytes())
        (snapshot / file.name).symlink_to(Path("../../blobs") / str(i))
    (root / "refs").mkdir()
    (root / "refs" / "main").write_text("0123abcd")
    assert len(list(plain.glob("*.safetensors"))) > 1
    want = open_checkpoint(plain)
    for given in (snapshot, root):
        ckpt = open_checkpoint(given)
        for name in want.param_names():
            np.testing.assert_array_equal(
                ckpt.param(name).astype(np.float32), want.param(name).astype(np.float32)
            )


def test_two_snapshots_and_no_reference(tmp_path):
    for name in ("a", "b"):
        (tmp_path / "snapshots" / name).mkdir(parents=True)
    with pytest.raises(MoecError, match="which snapshot"):
        open_checkpoint(tmp_path)
