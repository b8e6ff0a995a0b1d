from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch
from torch.nn import functional as F

from moec.errors import MoecError
from moec.reference.experts import (
    BlobLayout,
    ExpertWeights,
    activate,
    blob_section,
    pack_expert,
    round_activations,
    run_expert,
    unpack_expert,
)
from moec.reference.weights import dequantize_int4, quantize_int4
from tests.helpers.rng import fresh_rng


def random_expert(rng: np.random.Generator, layout: BlobLayout) -> ExpertWeights:
    rows, hidden, size = layout.gate_up_rows, layout.hidden_size, layout.intermediate_size
    shapes = [(rows, hidden), (hidden, size), (rows,), (hidden,)]
    return ExpertWeights(*(rng.standard_normal(shape).astype(np.float32) / 8 for shape in shapes))


def test_offsets_by_hand():
    layout = BlobLayout("int4", 576, 64, gated=True, has_bias=True)
    # 128 rows of 9*32 code bytes, 9 fp16 scales; 576 rows of 32 bytes, one scale; biases
    assert list(layout.offsets.values()) == [0, 36864, 39168, 57600, 58752, 59264]
    assert layout.blob_bytes == 65536
    assert BlobLayout("bf16", 576, 64).offsets == {"gate_up": 0, "down": 128 * 576 * 2}


@pytest.mark.parametrize("format", ["int4", "bf16"])
@pytest.mark.parametrize(("gated", "has_bias"), [(True, False), (False, True)])
def test_blobs_round_trip(format, gated, has_bias):
    rng = fresh_rng()
    layout = BlobLayout(format, 100, 72, gated, has_bias)
    weights = random_expert(rng, layout)
    blob = pack_expert(layout, weights)
    assert blob.size == layout.blob_bytes
    assert blob.size % 4096 == 0
    back = unpack_expert(layout, blob.view(np.int8))
    for name, columns in (("gate_up", 100), ("down", 72)):
        weight = getattr(weights, name)
        if format == "bf16":
            want = weight.astype(ml_dtypes.bfloat16).astype(np.float32)
        else:
            want = dequantize_int4(*quantize_int4(weight), columns)
        assert np.array_equal(getattr(back, name), want)
    if has_bias:
        assert np.array_equal(back.gate_up_bias, weights.gate_up_bias)
        assert np.array_equal(back.down_bias, weights.down_bias)
    for section in layout.sections.values():
        assert section.offset % 128 == 0


def test_another_quantizer_can_pack():
    layout = BlobLayout("int4", 64, 64)
    calls = []

    def spy(weight):
        calls.append(weight.shape)
        return quantize_int4(weight)

    weights = random_expert(fresh_rng(), layout)
    assert np.array_equal(pack_expert(layout, weights, spy), pack_expert(layout, weights))
    assert calls == [(128, 64), (64, 64)]


def test_sections_of_many_blobs():
    rng = fresh_rng()
    layout = BlobLayout("int4", 64, 64)
    blobs = np.stack([pack_expert(layout, random_expert(rng, layout)) for _ in range(3)])
    scales = blob_section(layout, blobs, "down_scales")
    assert scales.shape == (3, 64, 1)
    assert np.array_equal(scales[2], blob_section(layout, blobs[2], "down_scales"))


@pytest.mark.parametrize(
    ("name", "torch_act"),
    [
        ("silu", F.silu),
        ("gelu", F.gelu),
        ("gelu_tanh", lambda x: F.gelu(x, approximate="tanh")),
        ("relu2", lambda x: F.relu(x).square()),
    ],
)
def test_activations_equal_torch(name, torch_act):
    rng = fresh_rng()
    gate, up = rng.standard_normal((2, 5, 40)) * 4
    want = torch_act(torch.from_numpy(gate)).numpy()
    assert np.allclose(activate(name, gate, None), want, atol=1e-12)
    assert np.allclose(activate(name, gate, up), want * up, atol=1e-12)


def test_swiglu_oai_by_hand():
    gate, up = np.array([9.0, -9.0, 1.0]), np.array([9.0, -9.0, 0.5])
    want = [8 * 7 / (1 + np.exp(-1.7 * 7)), -6 * -9 / (1 + np.exp(1.7 * 9)), 1.5 / (1 + np.exp(-1.7))]
    assert np.allclose(activate("swiglu_oai", gate, up, alpha=1.7, limit=7.0), want)


def test_unknown_names_are_refused():
    with pytest.raises(MoecError, match="unknown activation 'tanh'"):
        activate("tanh", np.zeros(3), None)
    with pytest.raises(MoecError):
        BlobLayout("int3", 64, 64)
    layout = BlobLayout("int4", 64, 64)
    with pytest.raises(MoecError, match="gate_up"):
        pack_expert(layout, random_expert(fresh_rng(), BlobLayout("int4", 64, 64, gated=False)))


def test_rounded_activations_by_hand():
    x = np.zeros((1, 70), np.float32)
    x[0, :3] = [16256.0, 0.4, -63.5]
    x[0, 64:67] = [1.0, 0.5, -1.0]
    y = round_activations(x)
    assert y[0, :3].tolist() == [16256.0, 0.0, -64.0]
    assert np.allclose(y[0, 64:67], [1.0, 0.5, -1.0], atol=1 / 16256)
    assert not y[0, 3:64].any()


def test_int8_compute_is_close_and_not_used_with_bf16():
    rng = fresh_rng()
    x = rng.standard_normal((4, 128)).astype(np.float32)
    for format, equal in (("int4", False), ("bf16", True)):
        layout = BlobLayout(format, 128, 64)
        weights = unpack_expert(layout, pack_expert(layout, random_expert(rng, layout)))
        exact, rounded = (run_expert(layout, weights, x, "silu", compute=c) for c in ("fp32", "int8"))
        assert np.array_equal(exact, rounded) == equal
        assert np.linalg.norm(exact - rounded) <= 2e-4 * np.linalg.norm(exact)
