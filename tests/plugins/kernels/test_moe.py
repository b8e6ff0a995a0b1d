"""plugins/kernels/moe_*: router and experts under the emulator against moec.reference."""

import ctypes

import ml_dtypes
import numpy as np
import pytest

from moec.reference.experts import ACTIVATIONS, BlobLayout, ExpertWeights, activate, pack_expert
from moec.reference.moe import experts as reference_experts
from moec.reference.moe import pipelined_moe as reference_moe
from tests.helpers.kernels import DTYPES, ENUMS, ERROR_EXPERT_ID, MoeParams, moe_params, run_moe
from tests.helpers.kv_cases import assert_close, raw
from tests.helpers.simt import SCHEDULES
from tests.helpers.ties import decided_rows

F32 = np.float32


def make_layer(rng, **changes):
    """Attributes and tensors of a small layer; hidden is float32 that the activation type holds exactly."""
    attrs = {
        "num_experts": 8, "top_k": 2, "activation": "silu", "gated": 1, "alpha": 1.0, "limit": 0.0,
        "weight_format": "int4", "intermediate_size": 48, "has_bias": 0,
    }  # fmt: skip
    options = {"hidden_size": 64, "num_tokens": (3, 1), "chunk": 3, "dtype": "fp16"}
    options |= {name: changes.pop(name) for name in list(changes) if name in options}
    attrs |= changes
    h, experts = options["hidden_size"], attrs["num_experts"]
    layout = BlobLayout(
        attrs["weight_format"], h, attrs["intermediate_size"], bool(attrs["gated"]), bool(attrs["has_bias"])
    )
    num_tokens = np.array(options["num_tokens"], np.int32)
    router = {
        "router_weight": (rng.standard_normal((experts, h)) / 4).astype(F32),
        "router_bias": rng.standard_normal(experts).astype(F32),
        "selection_bias": (rng.standard_normal(experts) / 8).astype(F32),
    }

    def draw(count):
        return rng.standard_normal((count, h)).astype(DTYPES[options["dtype"]])

    tensors = {
        "hidden": decided_rows(draw, len(num_tokens) * options["chunk"], attrs, router),
        "num_tokens": num_tokens,
        **router,
        "experts": np.stack([pack_expert(layout, random_expert(rng, layout)) for _ in range(experts)]),
    }
    return attrs, tensors, options["dtype"]


def random_expert(rng, layout):
    h, inner, rows = layout.hidden_size, layout.intermediate_size, layout.gate_up_rows
    weights = [rng.standard_normal(shape).astype(F32) / 8 for shape in ((rows, h), (h, inner))]
    biases = (
        [rng.standard_normal(size).astype(F32) for size in (rows, h)] if layout.has_bias else [None, None]
    )
    return ExpertWeights(*weights, *biases)


def reference(attrs, tensors):
    dummy = np.zeros(1, np.int32), np.zeros((1, 1), np.int8)
    hidden = tensors["hidden"].astype(F32)
    if "ids" in tensors:
        args = (tensors["ids"], tensors["weights"], tensors["experts"])
        return reference_experts(hidden, tensors["num_tokens"], *args, *dummy, **attrs)[0]
    router = [tensors[name] for name in ("router_weight", "router_bias", "selection_bias")]
    predictor = np.zeros((1, hidden.shape[1]), F32)
    args = (*router, predictor, tensors["experts"], *dummy)
    return reference_moe(hidden, tensors["num_tokens"], *args, **attrs)[0]


def check_layer(lib, rng, attrs, tensors, dtype):
    schedule, seed = int(rng.integers(3)), int(rng.integers(1 << 30))
    out = run_moe(lib, tensors, attrs, dtype, schedule, seed)
    assert lib.read_error_flag() == 0
    assert_close(out, reference(attrs, tensors))


@pytest.mark.parametrize("gated", [1, 0])
@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize(("weight_format", "dtype"), [("int4", "fp16"), ("bf16", "bf16")])
def test_every_activation(lib, rng, activation, gated, weight_format, dtype):
    if activation == "swiglu_oai" and not gated:
        pytest.skip("swiglu_oai is gated by definition")
    layer = make_layer(
        rng, activation=activation, gated=gated, weight_format=weight_format, dtype=dtype, has_bias=1,
        alpha=1.702, limit=1.5,
    )  # fmt: skip
    check_layer(lib, rng, *layer)


@pytest.mark.parametrize("weight_format", ["int4", "bf16"])
@pytest.mark.parametrize("has_bias", [0, 1])
@pytest.mark.parametrize(
    ("hidden_size", "intermediate_size"), [(64, 64), (72, 200), (130, 30), (320, 96), (36, 513)]
)
def test_shapes_with_tails(lib, rng, weight_format, has_bias, hidden_size, intermediate_size):
    if hidden_size == 36:
        intermediate_size = 514  # even, and not a multiple of 4
    layer = make_layer(
        rng, weight_format=weight_format, has_bias=has_bias, hidden_size=hidden_size,
        intermediate_size=intermediate_size, num_experts=4,
    )  # fmt: skip
    check_layer(lib, rng, *layer)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_after_topk"])
@pytest.mark.parametrize("renormalize", [0, 1])
@pytest.mark.parametrize(
    "groups",
    [
        {},
        {"num_groups": 4, "topk_groups": 2, "group_score": "max"},
        {"num_groups": 4, "topk_groups": 2, "group_score": "top2"},
        {"num_groups": 10, "topk_groups": 5, "group_score": "top2"},
    ],
)
def test_every_router(lib, rng, scoring, renormalize, groups):
    layer = make_layer(
        rng, scoring=scoring, renormalize=renormalize, num_experts=40, top_k=5, intermediate_size=16,
        routed_scale=2.5, **groups,
    )  # fmt: skip
    check_layer(lib, rng, *layer)


def test_many_experts(lib, rng):
    layer = make_layer(rng, num_experts=160, top_k=8, intermediate_size=8, hidden_size=32, dtype="bf16")
    check_layer(lib, rng, *layer)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_after_topk"])
def test_ties_go_to_the_lower_id(lib, rng, scoring):
    attrs, tensors, dtype = make_layer(rng, scoring=scoring, num_experts=64, top_k=3, intermediate_size=8)
    tensors["router_weight"][:] = tensors["router_weight"][:1]
    tensors["router_bias"][:] = 0.25
    tensors["selection_bias"][:] = np.where(np.isin(np.arange(64), [9, 33, 40, 63]), 1, 0)
    check_layer(lib, rng, attrs, tensors, dtype)


@pytest.mark.parametrize("weight_format", ["int4", "bf16"])
def test_experts_with_given_ids(lib, rng, weight_format):
    attrs, tensors, dtype = make_layer(rng, weight_format=weight_format, top_k=3, num_tokens=(2, 0, 3))
    count = len(tensors["hidden"])
    tensors["ids"] = np.stack([rng.permutation(8)[:3] for _ in range(count)]).astype(np.int32)
    tensors["weights"] = rng.standard_normal((count, 3)).astype(F32)
    tensors["ids"][2] = 999  # padding: never looked at
    check_layer(lib, rng, attrs, tensors, dtype)


def test_bad_ids_are_skipped_and_flagged(lib, rng):
    attrs, tensors, dtype = make_layer(rng, num_tokens=(2,), chunk=2)
    tensors["ids"] = np.array([[1, 8], [-1, 3]], np.int32)
    tensors["weights"] = np.ones((2, 2), F32)
    out = run_moe(lib, tensors, attrs, dtype)
    assert lib.read_error_flag() == ERROR_EXPERT_ID
    tensors["ids"] = np.array([[1, 0], [0, 3]], np.int32)
    tensors["weights"] = np.array([[1, 0], [0, 1]], F32)
    assert_close(out, reference(attrs, tensors))


def test_padding_and_idle_rows_are_zero(lib, rng):
    attrs, tensors, dtype = make_layer(rng, num_tokens=(2, 0, 4), chunk=4)
    padding = ~(np.arange(4) < tensors["num_tokens"][:, None]).reshape(-1)
    tensors["hidden"][padding] = np.nan
    out = run_moe(lib, tensors, attrs, dtype)
    assert not out[padding].any()
    assert np.abs(out[~padding]).min(initial=1, where=out[~padding] != 0) > 0
    assert np.isfinite(out.astype(F32)).all()


def test_neighbours_and_schedules_do_not_change_bits(lib, rng):
    attrs, tensors, dtype = make_layer(rng, num_tokens=(1,) * 5, chunk=1, hidden_size=136, has_bias=1)
    outs = [run_moe(lib, tensors, attrs, dtype, schedule, 3) for schedule in SCHEDULES]
    for other in outs[1:]:
        np.testing.assert_array_equal(raw(other), raw(outs[0]))
    for t in range(5):
        alone = {**tensors, "hidden": tensors["hidden"][t : t + 1], "num_tokens": np.ones(1, np.int32)}
        np.testing.assert_array_equal(raw(run_moe(lib, alone, attrs, dtype)[0]), raw(outs[0][t]))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_activation_functions(lib, rng, activation):
    params = MoeParams(gated=1, alpha=1.702, limit=7.0, activation=ENUMS["activation"].index(activation))
    gates = np.concatenate([rng.standard_normal(200) * 4, [0, 40, -40, 90, -90]]).astype(F32)
    ups = rng.standard_normal(gates.size).astype(F32) * F32(5)
    got = [lib.run_activation(ctypes.byref(params), g, u) for g, u in zip(gates, ups, strict=True)]
    want = activate(activation, gates, ups, 1.702, 7.0)
    np.testing.assert_allclose(got, want, rtol=2e-5, atol=2e-6 * float(np.abs(ups).max()))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"top_k": 9}, b"top_k"),
        ({"group_size": 128}, b"group_size"),
        ({"num_slots": 4}, b"slot pool"),
        ({"blob_bytes": 4096}, b"another size"),
        ({"activation": 4, "gated": 0}, b"gated"),
        ({"activation": 7}, b"activation"),
        ({"weight_format": 2}, b"weight_format"),
        ({"dtype": -1}, b"fp16 or bf16"),
        ({"rows": 4}, b"divide"),
        ({"num_groups": 3}, b"divide into the groups"),
        ({"num_groups": 4, "topk_groups": 5}, b"topk_groups"),
        ({"num_groups": 8, "topk_groups": 1}, b"fewer than top_k"),
        ({"scoring": 3}, b"scoring"),
        ({"num_experts": 100_000}, b"too many experts"),
        ({"intermediate_size": 0}, b"not positive"),
    ],
)
def test_check_names_what_is_wrong(lib, rng, change, message):
    attrs, tensors, dtype = make_layer(rng, intermediate_size=64, hidden_size=128)
    params = moe_params(tensors, attrs, dtype, None)
    assert lib.check_moe(ctypes.byref(params), 1) is None
    for name, value in change.items():
        setattr(params, name, value)
    assert message in lib.check_moe(ctypes.byref(params), 1)


def test_hidden_types_differ_only_by_rounding(lib, rng):
    attrs, tensors, _ = make_layer(rng, dtype="bf16")
    as_half = {**tensors, "hidden": tensors["hidden"].astype(np.float16)}
    out, half = run_moe(lib, tensors, attrs, "bf16"), run_moe(lib, as_half, attrs, "fp16")
    eps = float(ml_dtypes.finfo(out.dtype).eps)
    np.testing.assert_allclose(out.astype(F32), half.astype(F32), rtol=2 * eps, atol=2e-2)
