from __future__ import annotations

import numpy as np
from onnx import TensorProto, helper

from moec.dialect.emit import F32, I64, Body
from tests.helpers.rng import fresh_rng
from tests.helpers.single_op import stock_session


def run(body: Body, x: np.ndarray) -> np.ndarray:
    kind = helper.np_dtype_to_tensor_dtype(x.dtype)
    info = helper.make_tensor_value_info
    graph = helper.make_graph(
        body.nodes, "g", [info("x", kind, list(x.shape))], [info("y", TensorProto.FLOAT, None)]
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    return stock_session(model).run(None, {"x": x})[0]


def test_expressions_mean_what_numpy_means():
    x = fresh_rng().standard_normal((2, 3, 8)).astype(np.float32)
    body = Body()
    v = body.input("x", F32)
    y = body.where((v > 0.0) & (v < 1.0), v * 2.0 - 1.0, v.clip(-0.5, 0.5) / 4.0)
    body.result("y", y.transpose(0, 2, 1).reshape(v.size(0), -1))
    want = np.where((x > 0) & (x < 1), x * 2 - 1, np.clip(x, -0.5, 0.5) / 4).transpose(0, 2, 1).reshape(2, -1)
    assert np.array_equal(run(body, x), want.astype(np.float32))


def test_gather_rows_gathers_per_batch_entry():
    x = np.arange(24, dtype=np.float32).reshape(2, 3, 4)
    body = Body()
    rows = body.constant([[2, 0], [1, 1]], I64)
    body.result("y", body.input("x", F32).gather_rows(rows))
    assert np.array_equal(run(body, x), np.stack([x[0, [2, 0]], x[1, [1, 1]]]))


def test_equal_constants_share_a_node():
    body = Body()
    assert body.ints(1, 2) is body.ints(1, 2)
    assert body.constant(0, F32) is not body.constant(0, I64)
    assert body.constant(0.0, F32) is not body.constant(-0.0, F32)
    assert len(body.nodes) == 4
