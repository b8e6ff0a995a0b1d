from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
from onnx import TensorProto, helper

from moec.dialect.emit import U8, Body
from moec.dialect.moe_body import _bfloat, _half, _single
from moec.reference.moe import experts, pipelined_moe
from tests.helpers.moe_case import expert_attributes, moe_attributes, moe_inputs
from tests.helpers.rng import fresh_rng
from tests.helpers.single_op import FunctionOp, stock_session

ROUTERS = {
    "softmax": {},
    "renormalized, scaled": {"renormalize": 1, "routed_scale": 2.5},
    "sigmoid, groups by two": {
        "scoring": "sigmoid",
        "num_groups": 4,
        "topk_groups": 2,
        "group_score": "top2",
        "renormalize": 1,
    },
    "softmax, groups by best": {"num_groups": 4, "topk_groups": 1},
    "groups of one": {"num_groups": 8, "topk_groups": 3, "group_score": "top2"},
    "softmax after": {"scoring": "softmax_after_topk"},
    "top 1": {"top_k": 1},
    "all experts": {"top_k": 8},
}
EXPERTS = {
    "int4 silu": {},
    "bf16 gelu with biases": {"weight_format": "bf16", "activation": "gelu", "has_bias": 1},
    "int4 tanh gelu with biases": {"activation": "gelu_tanh", "has_bias": 1},
    "int4 relu2, not gated": {"activation": "relu2", "gated": 0, "has_bias": 1},
    "bf16 silu, not gated": {"weight_format": "bf16", "gated": 0},
    "bf16 swiglu_oai": {"weight_format": "bf16", "activation": "swiglu_oai", "has_bias": 1},
}


def assert_close(got: np.ndarray, want: np.ndarray) -> None:
    assert np.abs(got - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.parametrize("changes", [*ROUTERS.values(), *EXPERTS.values()], ids=[*ROUTERS, *EXPERTS])
def test_equals_the_reference(changes):
    rng = fresh_rng()
    attributes = moe_attributes(**changes)
    function = FunctionOp("PipelinedMoE", **attributes)
    for counts, steps in (([3, 0, 1], 3), ([1], 1), ([60], 64)):
        inputs = moe_inputs(rng, attributes, counts, steps)
        want = pipelined_moe(**inputs, **attributes)
        got = function(**inputs)
        assert_close(got[0], want[0])
        assert np.array_equal(got[1], want[1])
        assert np.array_equal(got[2], want[2])


def test_experts_with_given_choice_and_garbage_in_the_padding():
    rng = fresh_rng()
    attributes = expert_attributes(moe_attributes())
    inputs = moe_inputs(rng, attributes, [3, 1], 3)
    for name in ("router_weight", "router_bias", "selection_bias", "predictor_weight"):
        del inputs[name]
    inputs["ids"] = rng.integers(0, 8, (6, 2)).astype(np.int32)
    inputs["weights"] = rng.random((6, 2)).astype(np.float32)
    inputs["hidden"][5], inputs["ids"][5], inputs["weights"][5] = np.nan, 99, np.nan
    got = FunctionOp("Experts", **attributes)(**inputs)
    assert_close(got[0], experts(**inputs, **attributes)[0])


@pytest.mark.parametrize(
    ("decode", "dtype"), [(_half, np.float16), (_bfloat, ml_dtypes.bfloat16), (_single, np.float32)]
)
def test_floats_are_put_together_exactly(decode, dtype):
    rng = fresh_rng()
    width = np.dtype(dtype).itemsize
    data = rng.integers(0, 256, (1, 4096 * width)).astype(np.uint8)
    special = np.array([0.0, -0.0, 1.0, -1.5, np.finfo(np.float16).tiny / 4, 65504.0], dtype)
    data[0, : special.size * width] = special.view(np.uint8)
    want = data.view(dtype).astype(np.float32)
    finite = np.isfinite(want)  # no blob holds others
    body = Body()
    body.result("y", decode(body.input("x", U8)))
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        body.nodes, "g", [info("x", TensorProto.UINT8, [1, "n"])], [info("y", TensorProto.FLOAT, None)]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    (got,) = stock_session(model).run(None, {"x": data})
    assert np.array_equal(got[finite], want[finite])
