from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper

from moec.dialect.block_body import dequantize, hadamard, quantize
from moec.dialect.emit import F32, U8, Body
from moec.reference import kv_block
from moec.reference.kv_cache import KVLayout
from tests.helpers.rng import fresh_rng
from tests.helpers.single_op import stock_session


def run(body: Body, outputs: dict[str, int], **inputs: np.ndarray) -> list[np.ndarray]:
    info = helper.make_tensor_value_info
    given = [info(n, helper.np_dtype_to_tensor_dtype(a.dtype), list(a.shape)) for n, a in inputs.items()]
    graph = helper.make_graph(body.nodes, "g", given, [info(n, k, None) for n, k in outputs.items()])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 24)], ir_version=11)
    return stock_session(model).run(None, inputs)


def hard_rows(rng: np.random.Generator, heads: int, dims: int) -> np.ndarray:
    """fp16 rows `[1,H,3,64,D]` with constant, huge, tiny, denormal and single-signed channels and tokens."""
    rows = rng.standard_normal((1, heads, 3, 64, dims)) * 10.0 ** rng.integers(-4, 4, dims)
    rows[..., 0] = 3.25
    rows[..., 1] = np.where(rng.random(64) < 0.5, 65504, -65504)
    rows[..., 2] = rng.integers(-3, 4, 64) * 2.0**-24
    rows[..., 3] = np.abs(rows[..., 3]) + 7
    rows[..., 4] = -0.0
    rows[:, :, 1, 5] = 0
    rows[:, :, 2, 6] = -(2.0**-12)
    return np.clip(rows, -65504, 65504).astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("format", ["mkv2", "mkv2_lean", "k4v2", "int8"])
@pytest.mark.parametrize("dims", [(64, 64), (80, 80), (96, 192), (256, 20)])
def test_bytes_are_those_of_the_reference(format, dims):
    rng = fresh_rng()
    layout = KVLayout(format, 2, *dims, 1000)
    rows = hard_rows(rng, 2, sum(dims))
    ref = (2.0 ** rng.integers(-3, 3, (2, layout.num_v_groups))).astype(np.float32)
    want = kv_block.quantize_block(layout, rows, ref[None, :, None])
    body = Body()
    body.result("y", quantize(layout, body.input("rows", F32), body.input("ref", F32)))
    (packed,) = run(body, {"y": TensorProto.UINT8}, rows=rows, ref=ref)
    assert np.array_equal(packed, want)
    body = Body()
    k, v = dequantize(layout, body.input("blocks", U8), body.input("ref", F32))
    body.result("k", k)
    body.result("v", v)
    got = run(body, {"k": TensorProto.FLOAT, "v": TensorProto.FLOAT}, blocks=want, ref=ref)
    for a, b in zip(got, kv_block.dequantize_block(layout, want, ref[None, :, None]), strict=True):
        assert np.array_equal(a, b)


@pytest.mark.parametrize("group", [1, 4, 64])
def test_rotation_is_bit_identical(group):
    x = fresh_rng().standard_normal((2, 5, 3 * group)).astype(np.float32)
    body = Body()
    body.result("y", hadamard(body.input("x", F32), group))
    (y,) = run(body, {"y": TensorProto.FLOAT}, x=x)
    assert np.array_equal(y, kv_block.hadamard(x, group))
