"""Lowered graphs compute what the rewritten graphs do.

Both run in the reference evaluator of onnx, with simple stand-ins for the moec operators (the same for both),
on random weights quantized by the reference. What is tested is everything else: weights as inputs, codes,
embeddings, types, routing precision.
"""

import ml_dtypes
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from moec.compile.lowering import lower
from moec.errors import MoecError
from moec.reference.weights import quantize_int4, quantize_int8
from tests.compile.test_residual_norms import AddRMSNorm
from tests.helpers.rng import fresh_rng
from tests.helpers.trt_engine import lowered, stored_for
from tests.helpers.trt_graph import BATCH, CONTEXT, HIDDEN, VOCAB, rewritten

F16, F32 = np.float16, np.float32


class AsymKVAttention(OpRun):
    op_domain = "moec"

    def _run(self, q, k, v, blocks, ring, *_, **__):
        mixed = q.astype(F32) + np.repeat(k.astype(F32) * v.astype(F32), q.shape[2] // k.shape[2], axis=2)
        return mixed.reshape(*q.shape[:2], -1).astype(q.dtype), blocks, ring


class PipelinedMoE(OpRun):
    op_domain = "moec"

    def _run(self, hidden, num_tokens, router, *states, **_):
        assert router.dtype == F32
        scores = np.tanh(hidden.astype(F32) @ router.T)
        out = (scores @ router).astype(hidden.dtype)
        return (out, *states[-2:]) if len(self.onnx_node.output) == 3 else (out,)


class QuantizedLinear(OpRun):
    op_domain = "moec"

    def _run(self, x, codes, scales, bits=None, group_size=None, version=None):
        return ((x.astype(F32) @ decode(codes, scales, bits)[:, : x.shape[-1]].T).astype(x.dtype),)


OPS = [AsymKVAttention, PipelinedMoE, QuantizedLinear, AddRMSNorm]


def decode(codes, scales, bits):
    """The matrix of int4 or int8 codes: float32 [N, padded K]."""
    raw = codes.view(np.uint8)
    if bits == 4:
        values = np.stack([raw & 15, raw >> 4], axis=-1).reshape(len(raw), -1).astype(F32) - 8
    else:
        values = raw.astype(F32) - 128
    return values * np.repeat(scales.astype(F32), 64, axis=1)


def random_weights(model, rng, weights):
    """Fill the graph's weights with what the stored form decodes to; returns the engine's weight inputs."""
    fed = {}
    for tensor in model.graph.initializer:
        if not tensor.name.endswith(".weight"):
            continue
        shape = tuple(tensor.dims)
        value = rng.standard_normal(shape).astype(F32) * F32(shape[-1] ** -0.5 if len(shape) == 2 else 1)
        if f"{tensor.name}.codes" in stored_for(model, weights):
            bits = 8 if "embed" in tensor.name else 4
            codes, scales = (quantize_int8 if bits == 8 else quantize_int4)(value)
            fed[f"{tensor.name}.codes"] = codes.reshape(shape[0], -1).view(np.int8)
            fed[f"{tensor.name}.scales"] = scales
            value = decode(codes.reshape(shape[0], -1), scales, bits)[:, : shape[1]]
        else:
            value = value.astype(ml_dtypes.bfloat16).astype(F32)
            fed[tensor.name] = value
        tensor.CopyFrom(numpy_helper.from_array(np.ascontiguousarray(value), tensor.name))
    return fed


def random_inputs(model, rng, b, s):
    """Feeds of every input but the weights."""
    feeds = {
        "input_ids": rng.integers(0, VOCAB, (b, s)).astype(np.int32),
        "slot_ids": rng.permutation(BATCH)[:b].astype(np.int32),
        "lengths": rng.integers(0, CONTEXT - s, BATCH).astype(np.int32),
        "num_tokens": rng.integers(1, s + 1, b).astype(np.int32),
    }
    for value in model.graph.input:
        if value.name not in feeds:
            tensor = value.type.tensor_type
            dtype = onnx.helper.tensor_dtype_to_np_dtype(tensor.elem_type)
            feeds[value.name] = np.ones([dim.dim_value for dim in tensor.shape.dim], dtype)
    return feeds


def cast_weights(model, fed):
    types = {
        v.name: onnx.helper.tensor_dtype_to_np_dtype(v.type.tensor_type.elem_type) for v in model.graph.input
    }
    return {name: value.astype(types[name]) for name, value in fed.items()}


@pytest.mark.parametrize("weights", ["int4", "bf16"])
@pytest.mark.parametrize(("b", "s"), [(BATCH, 1), (1, 7)])
def test_the_lowered_graph_computes_the_same(weights, b, s):
    rng = fresh_rng()
    model = rewritten(layers=2)
    stored, fed = stored_for(model, weights), random_weights(model, rng, weights)
    proto = ir.to_proto(lower(ir.from_proto(model), stored, "fp16").model)
    feeds = random_inputs(model, rng, b, s)
    expected = ReferenceEvaluator(model, new_ops=OPS).run(["logits"], feeds)[0]
    names = {value.name for value in proto.graph.input}
    inputs = {k: v for k, v in feeds.items() if k in names} | cast_weights(proto, fed)
    actual = ReferenceEvaluator(proto, new_ops=OPS).run(["logits"], inputs)[0]
    assert actual.dtype == F32
    assert actual.shape == (b, VOCAB)
    assert np.abs(actual - expected).max() < 0.02 * np.abs(expected).max()
    assert np.abs(actual - expected).max() > 0  # fp16 was used


def value_types(model: ir.Model) -> dict[str, ir.DataType]:
    return {value.name: value.dtype for node in model.graph for value in node.outputs}


@pytest.mark.parametrize(
    ("dtype", "expected"), [("fp16", ir.DataType.FLOAT16), ("bf16", ir.DataType.BFLOAT16)]
)
def test_activations_have_the_asked_type_and_angles_stay_float32(dtype, expected):
    model = lowered(dtype).model
    types = value_types(model)
    assert types["attn.0"] == types["moe.1"] == expected
    assert types["logits"] == ir.DataType.FLOAT
    trigonometry = [node for node in model.graph if node.op_type in ("Cos", "Sin")]
    assert len(trigonometry) == 2
    assert all(node.inputs[0].dtype == ir.DataType.FLOAT for node in trigonometry)


def test_types_are_consistent():
    """Strongly typed TensorRT: float inputs of a standard node agree."""
    floats = {ir.DataType.FLOAT, ir.DataType.FLOAT16, ir.DataType.BFLOAT16}
    for node in lowered("bf16").model.graph:
        if node.domain == "" and node.op_type != "Cast":
            assert len({v.dtype for v in node.inputs if v is not None and v.dtype in floats}) <= 1, node.name


def test_every_weight_is_an_input_and_none_is_inside():
    result = lowered()
    graph = result.model.graph
    assert max(value.const_value.nbytes for value in graph.initializers.values()) <= 4 * HIDDEN
    inputs = {value.name: value for value in graph.inputs}
    assert all(carrier.input in inputs for carrier in result.carriers)
    codes = inputs["model.layers.0.self_attn.q_proj.weight.codes"]
    assert (codes.dtype, tuple(codes.shape)) == (ir.DataType.INT8, (256, 64))
    assert inputs["model.layers.0.mlp.gate.weight"].dtype == ir.DataType.FLOAT
    assert inputs["model.norm.weight"].dtype == ir.DataType.FLOAT16
    transforms = {carrier.input: carrier.transform for carrier in result.carriers}
    assert transforms["model.norm.weight"] == "cast"
    assert transforms["model.layers.0.mlp.gate.weight"] == "none"
    assert transforms["model.embed_tokens.weight.codes"] == "none"


def test_resident_experts_lose_their_state_outputs():
    for node in lowered().model.graph:
        if node.op_type == "PipelinedMoE":
            assert len(node.outputs) == 1


def test_the_given_model_is_left_alone():
    proto = rewritten()
    model = ir.from_proto(proto)
    before = ir.to_proto(model).SerializeToString()
    lower(model, stored_for(proto), "fp16")
    assert ir.to_proto(model).SerializeToString() == before


def test_functions_are_dropped():
    proto = rewritten()
    body = [onnx.helper.make_node("Identity", ["a"], ["b"])]
    opsets = [onnx.helper.make_opsetid("", 24)]
    proto.functions.append(onnx.helper.make_function("moec", "PipelinedMoE", ["a"], ["b"], body, opsets))
    assert not ir.to_proto(lower(ir.from_proto(proto), stored_for(proto)).model).functions


@pytest.mark.parametrize("columns", [128, 96])
def test_a_padded_last_group_is_cut(columns):
    """Embeddings whose width is no multiple of 64 decode to their own width."""
    rng = fresh_rng()
    table = rng.standard_normal((10, columns)).astype(F32)
    codes, scales = quantize_int8(table)
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("Gather", ["embed.weight", "ids"], ["rows"], name="gather")],
        "g",
        [onnx.helper.make_tensor_value_info("ids", onnx.TensorProto.INT32, ["b", "S"])],
        [onnx.helper.make_tensor_value_info("rows", onnx.TensorProto.FLOAT, ["b", "S", columns])],
        [numpy_helper.from_array(table, "embed.weight")],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 24)])
    flat = codes.reshape(10, -1)
    stored = {name: stored_tensor(name, array) for name, array in
              (("embed.weight.codes", flat), ("embed.weight.scales", scales))}  # fmt: skip
    proto = ir.to_proto(lower(ir.from_proto(model), stored).model)
    ids = rng.integers(0, 10, (2, 3)).astype(np.int32)
    feeds = {"ids": ids, "embed.weight.codes": flat.view(np.int8), "embed.weight.scales": scales}
    rows = ReferenceEvaluator(proto).run(None, feeds)[0]
    expected = decode(flat, scales, 8)[ids][..., :columns].astype(F16)
    assert rows.shape == (2, 3, columns)
    np.testing.assert_array_equal(rows, expected.astype(F32))


def stored_tensor(name, array):
    from moec.compile.stored import StoredTensor

    return StoredTensor(
        name, {"uint8": "U8", "float16": "F16"}[array.dtype.name], array.shape, 0, array.nbytes
    )


def test_fp32_caches_are_for_the_cpu():
    with pytest.raises(MoecError, match="fp32 is for the CPU only") as error:
        lowered(kv_format="fp32")
    assert "attention_0" in str(error.value)


def test_an_unknown_dtype_is_refused():
    with pytest.raises(MoecError, match="fp8"):
        lowered("fp8")


def test_a_quantized_weight_in_the_wrong_place_is_named():
    proto = rewritten()
    proto.graph.node.append(
        onnx.helper.make_node("Exp", ["model.layers.0.self_attn.q_proj.weight"], ["e"], name="exp_0")
    )
    proto.graph.output.append(onnx.helper.make_tensor_value_info("e", onnx.TensorProto.FLOAT, None))
    with pytest.raises(MoecError, match="Exp cannot read an int4 weight") as error:
        lower(ir.from_proto(proto), stored_for(proto))
    assert "q_proj" in str(error.value)


def test_a_weight_that_was_not_packed_is_named():
    proto = rewritten()
    model = ir.from_proto(proto)
    model.graph.initializers["model.norm.weight"].const_value = None
    stored = stored_for(proto)
    del stored["model.norm.weight"]
    with pytest.raises(MoecError, match=r"does not hold .* \(model\.norm\.weight\)"):
        lower(model, stored)
