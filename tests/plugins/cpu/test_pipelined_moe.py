"""The CPU MoE operator against the NumPy reference."""

import numpy as np
import pytest

from moec.native import register_store, unregister_store, xxh64
from moec.reference.moe import pipelined_moe
from moec.reference.routing import RouterConfig, route, router_logits
from tests.helpers.cpu_attention import close
from tests.helpers.cpu_moe import MoeCase
from tests.helpers.cpu_op import CpuOp

EXACT, INT8 = 1e-5, 1e-2


def check(
    case: MoeCase, tokens: list[int], width: int, tolerance: float, hidden: np.ndarray | None = None
) -> np.ndarray:
    op = CpuOp("PipelinedMoE", **case.attributes)
    inputs = case.pipelined(case.tokens(len(tokens) * width) if hidden is None else hidden, tokens)
    out = op(**inputs)[0]
    close(out, pipelined_moe(**inputs, **op.attributes)[0], tolerance)
    return out


@pytest.mark.parametrize("tokens", [1, 2, 5, 70])
@pytest.mark.parametrize(
    ("weight_format", "compute", "tolerance"),
    [("int4", "fp32", EXACT), ("bf16", "fp32", EXACT), ("int4", "int8", INT8)],
)
def test_formats(rng, weight_format, compute, tolerance, tokens):
    check(MoeCase(rng, weight_format=weight_format, extra=dict(compute=compute)), [tokens], tokens, tolerance)


def test_int8_activations_equal_the_reference_with_the_same_rounding(rng):
    case = MoeCase(rng, intermediate_size=64, extra=dict(compute="int8"))
    op = CpuOp("PipelinedMoE", **case.attributes)
    inputs = case.pipelined(case.tokens(4), [4])
    error = np.abs(op(**inputs)[0] - pipelined_moe(**inputs, **op.attributes)[0])
    assert np.median(error) < 1e-5  # a few inner activations may round the other way


@pytest.mark.parametrize(
    ("hidden", "intermediate"), [(64, 64), (576, 64), (100, 36), (72, 200), (65, 33), (16, 16)]
)
@pytest.mark.parametrize("weight_format", ["int4", "bf16"])
def test_sizes_that_do_not_fit_groups(rng, hidden, intermediate, weight_format):
    case = MoeCase(rng, hidden, intermediate, weight_format=weight_format)
    check(case, [3], 3, EXACT)


@pytest.mark.parametrize("activation", ["silu", "gelu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("has_bias", [True, False])
def test_activations(rng, activation, gated, has_bias):
    check(MoeCase(rng, gated=gated, has_bias=has_bias, extra=dict(activation=activation)), [4], 4, EXACT)


def test_gpt_oss_activation(rng):
    extra = dict(activation="swiglu_oai", alpha=1.702, limit=1.0, scoring="softmax_after_topk")
    check(MoeCase(rng, has_bias=True, extra=extra), [4], 4, EXACT)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_after_topk"])
@pytest.mark.parametrize("renormalize", [0, 1])
@pytest.mark.parametrize(
    "groups",
    [{}, dict(num_groups=4, topk_groups=2), dict(num_groups=4, topk_groups=2, group_score="top2")],
)
def test_routers(rng, scoring, renormalize, groups):
    extra = dict(scoring=scoring, renormalize=renormalize, routed_scale=2.5, **groups)
    check(MoeCase(rng, num_experts=16, top_k=4, extra=extra), [40], 40, EXACT)


def test_ties_go_to_the_lower_expert(rng):
    case = MoeCase(rng, extra=dict(scoring="softmax"))
    hidden = case.tokens(3)
    case.router_weight[:] = case.router_weight[0]
    case.router_bias[:] = case.selection_bias[:] = 0
    check(case, [3], 3, EXACT, hidden)


def test_padding_is_not_routed(rng):
    out = check(MoeCase(rng), [2, 0, 3, 1], 3, EXACT).reshape(4, 3, -1)
    assert not out[0, 2:].any()
    assert not out[1].any()
    assert not out[3, 1:].any()


def test_padding_may_hold_anything(rng):
    case = MoeCase(rng)
    op = CpuOp("PipelinedMoE", **case.attributes)
    hidden = case.tokens(4)
    hidden[1:] = np.nan
    assert np.isfinite(op(**case.pipelined(hidden, [1]))[0]).all()


@pytest.mark.parametrize(("weight_format", "compute"), [("int4", "int8"), ("int4", "fp32"), ("bf16", "fp32")])
def test_results_do_not_depend_on_the_batch(rng, weight_format, compute):
    case = MoeCase(rng, 200, 100, weight_format=weight_format, extra=dict(compute=compute))
    op = CpuOp("PipelinedMoE", **case.attributes)
    hidden = case.tokens(90)
    whole = op(**case.pipelined(hidden, [90]))[0]
    for start, end in ((0, 1), (1, 3), (3, 10), (10, 90)):
        part = op(**case.pipelined(hidden[start:end], [end - start]))[0]
        np.testing.assert_array_equal(part, whole[start:end])


def test_routing_is_the_references(rng):
    """One-hot experts: the output shows ids and weights directly."""
    case = MoeCase(rng, num_experts=8, top_k=4, has_bias=True, extra=dict(renormalize=1))
    for expert in range(8):
        bias = np.zeros(192, np.float32)
        bias[expert] = 1
        case.blobs[expert] = 0
        offset = case.layout.offsets["down_bias"]
        case.blobs[expert, offset : offset + 192 * 4] = bias.view(np.uint8)
    hidden = case.tokens(50)
    out = CpuOp("PipelinedMoE", **case.attributes)(**case.pipelined(hidden, [50]))[0]
    config = RouterConfig(8, 4, renormalize=True)
    logits = router_logits(hidden, case.router_weight, case.router_bias)
    ids, weights = route(config, logits, case.selection_bias)
    expected = np.zeros_like(out)
    np.put_along_axis(expected, ids.astype(np.int64), weights, -1)
    np.testing.assert_allclose(out, expected, rtol=1e-5, atol=1e-7)


def test_state_is_passed_through_in_place(rng):
    case = MoeCase(rng)
    CpuOp("PipelinedMoE", **case.attributes)(in_place=True, **case.pipelined(case.tokens(1), [1]))


def test_a_flipped_byte_is_found_at_first_touch(rng):
    case = MoeCase(rng, top_k=6)
    blobs = case.blobs.view(np.int8)
    address = register_store(blobs, np.array([xxh64(b) for b in blobs], np.uint64), 5)
    try:
        op = CpuOp("PipelinedMoE", **case.attributes)
        inputs = case.pipelined(case.tokens(2), [2])
        op(in_place=True, **inputs)
        unregister_store(address)
        hashes = np.array([xxh64(b) for b in blobs], np.uint64)
        blobs[4, 77] ^= 1
        register_store(blobs, hashes, 5)
        with pytest.raises(Exception, match=r"experts\.moex: layer 5 expert 4: checksum mismatch"):
            op(in_place=True, **inputs)
        blobs[4, 77] ^= 1
        op(in_place=True, **inputs)
    finally:
        unregister_store(address)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (dict(weight_format="mxfp4"), "mxfp4"),
        (dict(tile_layout="mma"), "tile_layout"),
        (dict(activation="tanh"), "tanh"),
        (dict(intermediate_size=4096), "experts has shape"),
        (dict(num_slots=4), "num_slots"),
    ],
)
def test_what_the_cpu_cannot_do_is_an_error(rng, change, message):
    case = MoeCase(rng)
    op = CpuOp("PipelinedMoE", **case.attributes)
    op.attributes |= change
    with pytest.raises(Exception, match=message):
        op(**case.pipelined(case.tokens(1), [1]))
