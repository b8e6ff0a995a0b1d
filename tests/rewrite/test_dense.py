"""Quantized dense layers and embeddings against transformers holding the dequantized weights."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moec import native
from moec.reference.weights import dequantize_int4, dequantize_int8, quantize_int4, quantize_int8
from moec.rewrite import run
from moec.rewrite.linear import read
from tests.helpers.built import build_graph
from tests.helpers.captured import captured, checkpoint
from tests.helpers.graphs import Stepper, random_texts, reference_logits, session, two_slots
from tests.rewrite.test_pipeline import context, needs_library


def _rounded_model(built):
    """transformers with the weights that the graph's codes stand for."""
    model = checkpoint("qwen2_moe").load_torch()
    kinds = {n: v.metadata_props["moec.transform"] for n, v in built.model.graph.initializers.items()
             if "moec.transform" in v.metadata_props}  # fmt: skip
    with torch.no_grad():
        for name, tensor in model.named_parameters():
            weight, kind = tensor.numpy(), kinds.get(name + ".codes")
            if kind == "int4":
                tensor.copy_(torch.from_numpy(dequantize_int4(*quantize_int4(weight), weight.shape[1])))
            elif kind == "int8":
                tensor.copy_(torch.from_numpy(dequantize_int8(*quantize_int8(weight), weight.shape[1])))
    return model


@needs_library
def test_int4_and_int8_weights(tmp_path):
    built = build_graph(checkpoint("qwen2_moe"), tmp_path, captured=captured("qwen2_moe"), weights="int4")
    model = _rounded_model(built)
    texts = random_texts(11, built.geometry)
    stepper = Stepper(session(built.save("n.onnx"), native.cpu_library()), built.constants)
    for got, text in zip(two_slots(stepper, *texts), texts, strict=True):
        want = reference_logits(model, text)
        # FusedLinear rounds activations to 8 bits; a wrong scale or layout is off by far more.
        error = np.abs(got - want) / np.abs(want).max()
        assert np.median(error) < 0.02


def test_which_layer_gets_which_format():
    model = captured("qwen2_moe").model.clone()
    run(model, context("qwen2_moe"))
    matrices = [m for n in model.graph if n.op_type == "FusedLinear" for m in read(n).matrices]
    bits = {w[0].name: w[0].shape[-1] // 8 for w, _ in matrices if len(w) == 2}
    assert bits.pop("model.embed_tokens.weight.codes") == 8  # the tied output projection
    kinds = {8: {"k_proj", "v_proj", "o_proj", "down_proj"}, 4: {"q_proj", "gate_proj", "up_proj"}}
    for width, names in kinds.items():
        assert {name.split(".")[-3] for name, b in bits.items() if b == width} == names
    assert len(bits) == 14
    biased = {b.name.split(".")[-2] for _, b in matrices if b is not None}
    assert sorted(biased) == ["k_proj", "q_proj", "v_proj"]
    assert {w[0].name.split(".")[-2] for w, _ in matrices if len(w) == 1} == {"shared_expert_gate"}
    gather = next(n for n in model.graph if n.op_type == "GatherBlockQuantized")
    assert gather.inputs[0].name == "model.embed_tokens.weight.codes"


def test_bf16_keeps_routers_and_gates_in_fp32():
    model = captured("qwen2_moe").model.clone()
    run(model, context("qwen2_moe", weights="bf16"))
    kinds = {n: v.metadata_props.get("moec.transform") for n, v in model.graph.initializers.items()}
    assert kinds["model.layers.0.mlp.gate.weight"] == "f32"
    assert kinds["model.layers.0.mlp.shared_expert_gate.weight"] == "f32"
    assert kinds["model.layers.0.self_attn.q_proj.weight"] == "bf16"
    assert kinds["model.embed_tokens.weight"] == "bf16"
    assert kinds["model.norm.weight"] == "f32"


@pytest.mark.parametrize("weights", ["int4", "bf16"])
def test_every_parameter_says_how_it_is_stored(weights):
    for family in ("qwen2_moe", "gpt_oss", "deepseek_v3"):
        model = captured(family).model.clone()
        run(model, context(family, weights=weights))
        for name, value in model.graph.initializers.items():
            if value.const_value is None:
                assert value.metadata_props.get("moec.transform") in ("int4", "int8", "bf16", "f32"), name
