"""weights.safetensors: readable by the safetensors library, aligned, deterministic, right values."""

from __future__ import annotations

import errno
import os
import tracemalloc

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch

from moec.errors import MoecError
from moec.pack import weights as weights_module
from moec.pack.weights import TensorPlan, plan_weights, write_weights
from moec.reference.weights import dequantize_int4, dequantize_int8, quantize_int4, quantize_int8
from tests.helpers.fake_checkpoint import ArrayCheckpoint


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.fixture
def checkpoint(rng) -> ArrayCheckpoint:
    def weight(*shape):
        return rng.normal(size=shape).astype(ml_dtypes.bfloat16)

    arrays = {"dense": weight(33, 100), "embed": weight(50, 128), "norm": weight(7), "router": weight(8, 65)}
    arrays["scalar"] = np.float32(3.5).reshape(())
    arrays["conv"] = rng.normal(size=(3, 1, 5)).astype(np.float32)
    return ArrayCheckpoint(arrays)


PLANS = [
    TensorPlan("norm", "bf16"),
    TensorPlan("dense", "int4"),
    TensorPlan("embed", "int8"),
    TensorPlan("scalar", "f32"),
    TensorPlan("router", "f32"),
    TensorPlan("conv", "bf16"),
]


def test_the_safetensors_library_reads_every_tensor(tmp_path, checkpoint):
    path, arrays = tmp_path / "w.safetensors", checkpoint.arrays
    places = write_weights(path, PLANS, checkpoint)
    read = safetensors.torch.load_file(path)
    assert {name for name in read if not name.startswith(".pad")} == places.keys()
    codes, scales = quantize_int4(arrays["dense"])
    np.testing.assert_array_equal(read["dense.codes"].numpy(), codes)
    np.testing.assert_array_equal(read["dense.scales"].numpy(), scales)
    codes, scales = quantize_int8(arrays["embed"])
    np.testing.assert_array_equal(read["embed.codes"].numpy(), codes)
    np.testing.assert_array_equal(read["embed.scales"].numpy(), scales)
    np.testing.assert_array_equal(read["router"].numpy(), arrays["router"].astype(np.float32))
    assert read["norm"].dtype == torch.bfloat16
    assert read["norm"].float().tolist() == arrays["norm"].astype(np.float32).tolist()
    assert read["scalar"].item() == 3.5
    assert torch.equal(read["conv"], torch.from_numpy(arrays["conv"]).bfloat16())


def test_quantized_weights_are_close(tmp_path, checkpoint):
    path = tmp_path / "w.safetensors"
    write_weights(path, PLANS, checkpoint)
    read = {k: v.numpy() for k, v in safetensors.torch.load_file(path).items() if v.dtype != torch.bfloat16}
    for name, back, bound in (("dense", dequantize_int4, 0.12), ("embed", dequantize_int8, 0.008)):
        want = checkpoint.arrays[name].astype(np.float32)
        error = np.linalg.norm(back(read[f"{name}.codes"], read[f"{name}.scales"], want.shape[1]) - want)
        assert error / np.linalg.norm(want) < bound


def test_places_are_aligned_and_true(tmp_path, checkpoint):
    path = tmp_path / "w.safetensors"
    places = write_weights(path, PLANS, checkpoint)
    data = path.read_bytes()
    assert all(offset % 64 == 0 for offset, _ in places.values())
    offset, length = places["router"]
    np.testing.assert_array_equal(
        np.frombuffer(data[offset : offset + length], np.float32),
        checkpoint.arrays["router"].astype(np.float32).ravel(),
    )
    assert len(data) == plan_weights(PLANS, checkpoint.shape).total_bytes


def test_chunks_change_nothing_and_progress_adds_up(tmp_path, checkpoint, monkeypatch):
    write_weights(tmp_path / "a", PLANS, checkpoint)
    monkeypatch.setattr(weights_module, "_CHUNK_BYTES", 1000)
    seen = []
    places = write_weights(tmp_path / "b", PLANS, checkpoint, seen.append)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()
    assert sum(length for _, length in places.values()) <= sum(seen) <= (tmp_path / "b").stat().st_size
    assert len(seen) > 40


def test_memory_stays_bounded(tmp_path, monkeypatch):
    monkeypatch.setattr(weights_module, "_CHUNK_BYTES", 1 << 18)
    checkpoint = ArrayCheckpoint({"big": np.ones((1 << 14, 512), ml_dtypes.bfloat16)})
    tracemalloc.start()
    write_weights(tmp_path / "w", [TensorPlan("big", "int4")], checkpoint)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 6 << 20  # the tensor is 16 MiB in bf16, 32 MiB in fp32


def test_nothing_to_write_is_a_valid_file(tmp_path, checkpoint):
    assert write_weights(tmp_path / "w", [], checkpoint) == {}
    assert safetensors.numpy.load_file(tmp_path / "w") == {}


@pytest.mark.parametrize("plan", [TensorPlan("norm", "int4"), TensorPlan("dense", "fp5")])
def test_impossible_plans(tmp_path, checkpoint, plan):
    with pytest.raises(MoecError, match="cannot be stored"):
        write_weights(tmp_path / "w", [plan], checkpoint)


def test_a_tensor_twice(tmp_path, checkpoint):
    with pytest.raises(MoecError, match="packed twice: norm"):
        write_weights(tmp_path / "w", [TensorPlan("norm", "bf16"), TensorPlan("norm", "f32")], checkpoint)


def test_nan_names_the_tensor(tmp_path, checkpoint):
    checkpoint.arrays["dense"][3, 4] = np.nan
    with pytest.raises(MoecError, match="dense"):
        write_weights(tmp_path / "w", PLANS, checkpoint)


def test_a_full_disk_names_the_file(tmp_path, checkpoint):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    needed = plan_weights(PLANS, checkpoint.shape).total_bytes
    with pytest.raises(MoecError, match=rf"w\.safetensors, which needs {needed} bytes"):
        write_weights(tmp_path / "w.safetensors", PLANS, checkpoint, full)
