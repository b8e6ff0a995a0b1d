from __future__ import annotations

import numpy as np
import onnxruntime as ort
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from onnx import TensorProto, helper

from moec.errors import MoecError
from moec.reference.weights import (
    INT4_SHRINK,
    dequantize_int4,
    dequantize_int8,
    pack_nibbles,
    quantize_int4,
    quantize_int8,
    unpack_nibbles,
)
from tests.helpers.rng import fresh_rng


def search_by_loops(group: np.ndarray) -> tuple[list[int], np.float16]:
    """The int4 search of one group of 64 as scalar code, in float32."""
    extreme = group[0]
    for w in group:
        extreme = w if abs(w) > abs(extreme) else extreme
    best = None
    for factor in INT4_SHRINK:
        scale = np.float16((extreme * factor) / np.float32(-8)) or np.float16(1)
        codes = [min(15, max(0, int(np.rint(w / np.float32(scale))) + 8)) for w in group]
        errors = [(w - np.float32(c - 8) * np.float32(scale)) ** 2 for w, c in zip(group, codes, strict=True)]
        while len(errors) > 1:
            half = len(errors) // 2
            errors = [a + b for a, b in zip(errors[:half], errors[half:], strict=True)]
        if best is None or errors[0] < best[0]:
            best = errors[0], codes, scale
    return best[1], best[2]


def test_int4_search_equals_scalar_code():
    rng = fresh_rng()
    weight = (rng.standard_t(4, (5, 150)) * 0.1).astype(np.float32)
    codes, scales = quantize_int4(weight)
    assert codes.shape == (5, 96)
    assert scales.shape == (5, 3)
    padded = np.pad(weight, ((0, 0), (0, 42))).reshape(5, 3, 64)
    for row, group in np.ndindex(5, 3):
        want, scale = search_by_loops(padded[row, group])
        assert unpack_nibbles(codes[row]).reshape(3, 64)[group].tolist() == want
        assert scales[row, group] == scale


def test_int4_by_hand():
    weight = np.zeros((1, 64), np.float32)
    weight[0, :4] = [0.8, -0.1, 0.3, -0.7]
    codes, scales = quantize_int4(weight)
    assert scales[0, 0] == np.float16(-0.1)  # the extreme value 0.8 gets code 0
    assert unpack_nibbles(codes)[0, :5].tolist() == [0, 9, 5, 15, 8]
    assert codes[0, 0] == 0 | 9 << 4


@pytest.mark.parametrize("value", [0.0, 1e-9, -1e-12])
def test_empty_groups_get_scale_one_and_the_zero_code(value):
    weight = np.full((1, 64), value, np.float32)
    codes, scales = quantize_int4(weight)
    assert scales[0, 0] == 1
    assert (codes == 0x88).all()
    codes, scales = quantize_int8(weight)
    assert scales[0, 0] == 1
    assert (codes == 128).all()


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**32 - 1), st.integers(1, 200), st.integers(-12, 6))
def test_errors_are_bounded_by_the_scale(seed, columns, exponent):
    weight = (np.random.default_rng(seed).standard_normal((3, columns)) * 2.0**exponent).astype(np.float32)
    codes, scales = quantize_int4(weight)
    top = np.abs(np.pad(weight, ((0, 0), (0, -columns % 64))).reshape(3, -1, 64)).max(-1)
    error = np.abs(dequantize_int4(codes, scales, columns) - weight)
    # The far end (+7 steps) loses one step, and shrinking is taken only where it helps the sum; a scale is a
    # half-precision number with an absolute error of up to 2^-25.
    assert (error <= np.repeat(top, 64, 1)[:, :columns] * (1 / 8 + 0.16) + 2.0**-22).all()
    codes, scales = quantize_int8(weight)
    error = np.abs(dequantize_int8(codes, scales, columns) - weight)
    assert (error <= np.repeat(top, 64, 1)[:, :columns] * 0.51 / 127 + 2.0**-18).all()


def test_search_beats_the_plain_scale():
    weight = fresh_rng().standard_normal((200, 64)).astype(np.float32)
    error = np.square(dequantize_int4(*quantize_int4(weight), 64) - weight).mean()
    extreme = np.take_along_axis(weight, np.abs(weight).argmax(1)[:, None], 1) / -8
    plain = np.square((np.clip(np.rint(weight / extreme), -8, 7)) * extreme - weight).mean()
    assert error < 0.96 * plain


@pytest.mark.parametrize(("bits", "columns"), [(4, 192), (4, 100), (8, 128)])
def test_bytes_are_those_of_matmulnbits(bits, columns):
    rng = fresh_rng()
    weight = rng.standard_normal((6, columns)).astype(np.float32)
    x = rng.standard_normal((3, columns)).astype(np.float32)
    quantize, dequantize = ((quantize_int4, dequantize_int4), (quantize_int8, dequantize_int8))[bits == 8]
    codes, scales = quantize(weight)
    groups = scales.shape[1]
    node = helper.make_node(
        "MatMulNBits",
        ["x", "b", "s"],
        ["y"],
        domain="com.microsoft",
        K=columns,
        N=6,
        bits=bits,
        block_size=64,
    )
    info, f32 = helper.make_tensor_value_info, TensorProto.FLOAT
    inputs = [
        info("x", f32, [3, columns]),
        info("b", TensorProto.UINT8, [6, groups, 64 * bits // 8]),
        info("s", f32, [6 * groups]),
    ]
    graph = helper.make_graph([node], "g", inputs, [info("y", f32, [3, 6])])
    opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    session = ort.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    feeds = {"x": x, "b": codes.reshape(6, groups, -1), "s": scales.astype(np.float32).reshape(-1)}
    (y,) = session.run(None, feeds)
    assert np.allclose(y, x @ dequantize(codes, scales, columns).T, atol=1e-4)


def test_nibbles_round_trip():
    codes = fresh_rng().integers(0, 16, (3, 64)).astype(np.uint8)
    assert np.array_equal(unpack_nibbles(pack_nibbles(codes)), codes)


@pytest.mark.parametrize("wrong", [np.full((2, 64), np.nan), np.full((2, 64), np.inf), np.zeros(64)])
def test_weights_that_cannot_be_quantized_are_refused(wrong):
    for quantize in (quantize_int4, quantize_int8):
        with pytest.raises(MoecError):
            quantize(wrong)


def test_importance_lowers_the_error_that_counts():
    rng = fresh_rng()
    weight = rng.standard_normal((64, 256)).astype(np.float32)
    importance = np.exp(2 * rng.standard_normal(256)).astype(np.float32)

    def error(*counts):
        return (np.square(dequantize_int4(*quantize_int4(weight, *counts), 256) - weight) * importance).sum()

    assert error(importance) < 0.95 * error()
    assert error(np.full(256, 3.0, np.float32)) == error()
