"""Reshapes that cancel, and the rotary pattern of half precision models."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime as ort
import pytest
import torch
from onnx import TensorProto as T
from onnx import helper as h
from transformers.models.qwen2_moe.modeling_qwen2_moe import apply_rotary_pos_emb

from moec.frontend.simplify import fuse_rotary, merge_reshapes
from tests.helpers.rng import fresh_rng


def _model(nodes, inputs, outputs, constants=()):
    graph = h.make_graph(
        nodes, "g", inputs, outputs, [onnx.numpy_helper.from_array(a, n) for n, a in constants]
    )
    return h.make_model(graph, opset_imports=[h.make_opsetid("", 24)], ir_version=11)


@pytest.mark.parametrize(("second", "allowzero", "left"), [([0, -1], 0, 2), ([-1, 8], 0, 1), ([4, 8], 1, 1)])
def test_reshape_of_reshape(second, allowzero, left):
    nodes = [
        h.make_node("Reshape", ["x", "a"], ["y"]),
        h.make_node("Reshape", ["y", "b"], ["z"], allowzero=allowzero),
        h.make_node("Neg", ["z"], ["out"]),
    ]
    proto = _model(
        nodes,
        [h.make_tensor_value_info("x", T.FLOAT, [2, 2, 8])],
        [h.make_tensor_value_info("out", T.FLOAT, None)],
        [("a", np.array([4, 8])), ("b", np.array(second))],
    )
    x = fresh_rng().standard_normal((2, 2, 8)).astype(np.float32)
    run = lambda p: ort.InferenceSession(p.SerializeToString()).run(None, {"x": x})[0]  # noqa: E731
    want = run(proto)
    model = ir.from_proto(proto)
    merge_reshapes(model.graph)
    used = [n for n in model.graph if n.op_type == "Reshape" and any(o.uses() for o in n.outputs)]
    assert len(used) == left
    np.testing.assert_array_equal(run(ir.to_proto(model)), want)


class _Rotary(torch.nn.Module):
    """cos and sin are computed in fp32 and cast, as transformers does in half precision."""

    def forward(self, x, freqs):
        both = torch.cat([freqs, freqs], -1)
        return apply_rotary_pos_emb(x, x, both.cos().to(x.dtype), both.sin().to(x.dtype))[0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_rotary_pattern(dtype):
    x, freqs = torch.randn(2, 4, 3, 16).to(dtype), torch.rand(2, 3, 8) * 9
    program = torch.onnx.export(
        _Rotary(), (x, freqs), dynamo=True, opset_version=24, verbose=False, optimize=True
    )
    model = program.model
    fuse_rotary(model)
    assert sum(n.op_type == "RotaryEmbedding" for n in model.graph) == 1
    session = ort.InferenceSession(ir.to_proto(model).SerializeToString())
    feeds = dict(zip((i.name for i in session.get_inputs()), (x.numpy(), freqs.numpy()), strict=True))
    tolerance = 1e-6 if dtype == torch.float32 else 4e-3
    np.testing.assert_allclose(session.run(None, feeds)[0], _Rotary()(x, freqs).numpy(), atol=tolerance)
