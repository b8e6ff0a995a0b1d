"""Inputs that no working model gives: they stay where they are, and nothing reads or writes out of place."""

import numpy as np
import pytest

from moec.reference.kv_cache import KVLayout
from tests.helpers.kernels import ERROR_CAPACITY, run_attention, run_moe
from tests.helpers.kv_cases import check_step, make_case, make_step, raw, run_kernel
from tests.plugins.kernels.test_moe import make_layer

F32 = np.float32
FORMATS = ["mkv2", "int8", "fp16"]


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_a_bad_query_spoils_its_own_head_only(lib, rng, format, value):
    """In a group of query heads that share a pass, in a chunk, beside other rows."""
    case = make_case(rng, KVLayout(format, 2, 64, 80, context=400), 12, [210, 150])
    step = make_step(rng, case, [1, 0], [3, 3], 3)
    clean, clean_state = run_kernel(lib, case, step)
    step["q"][1, 1, 4, 17] = value
    out, state = run_kernel(lib, case, step)
    heads, clean_heads = (x.reshape(2, 3, 12, 80) for x in (out, clean))
    assert np.isnan(heads[1, 1, 4].astype(F32)).all()
    touched = np.zeros((2, 3, 12), bool)
    touched[1, 1, 4] = True
    np.testing.assert_array_equal(raw(heads[~touched]), raw(clean_heads[~touched]))
    np.testing.assert_array_equal(raw(state["ring"]), raw(clean_state["ring"]))
    np.testing.assert_array_equal(state["blocks"], clean_state["blocks"])


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("count", [4, 2**31 - 1, -1, -(2**31)])
def test_a_count_out_of_range_is_flagged(lib, rng, format, count):
    """More tokens than the call has positions, or fewer than none; the other row works on."""
    case = make_case(rng, KVLayout(format, 1, 64, 64, context=300), 2, [100, 150])
    step = make_step(rng, case, [0, 1], [3, 2], 3)
    step["num_tokens"][0] = count
    out, state = run_kernel(lib, case, step)
    assert lib.read_error_flag() == ERROR_CAPACITY
    assert out[0].any() == (count > 0)
    other = {name: step[name][1:] for name in step}
    alone, _ = run_kernel(lib, case, other)
    np.testing.assert_array_equal(raw(out[1]), raw(alone[0]))
    if count < 0:
        np.testing.assert_array_equal(raw(state["ring"][0]), raw(case.tensors["ring"][0]))


@pytest.mark.parametrize("format", FORMATS)
def test_a_slot_of_the_greatest_length(lib, rng, format):
    case = make_case(rng, KVLayout(format, 1, 64, 64, context=300), 2, [100])
    case.tensors["lengths"][0] = 2**31 - 1
    step = make_step(rng, case, [0], [3], 3)
    out, state = run_kernel(lib, case, step)
    assert lib.read_error_flag() == ERROR_CAPACITY
    assert not out.any()
    np.testing.assert_array_equal(raw(state["ring"]), raw(case.tensors["ring"]))


@pytest.mark.parametrize("format", ["mkv2", "int8"])
def test_a_long_context_takes_several_passes(lib, rng, format):
    """The scratch for partial results holds fewer tokens than the chunk has: the rest comes later."""
    layout = KVLayout(format, 1, 16, 256, context=9000)
    case = make_case(rng, layout, 16, [100])
    check_step(lib, case, make_step(rng, case, [0], [70], 70))


@pytest.mark.parametrize("dims", [(4, 4), (512, 512), (4, 512), (500, 252)])
@pytest.mark.parametrize("format", FORMATS)
def test_the_smallest_and_the_largest_heads(lib, rng, dims, format):
    case = make_case(rng, KVLayout(format, 1, *dims, context=300), 3, [143, 210])
    check_step(lib, case, make_step(rng, case, [0, 1], [2, 1], 2))


@pytest.mark.parametrize("sizes", [(0, 0, 0), (1, 1, 0), (64, 0, 70), (0, 128, 5)])
@pytest.mark.parametrize("format", ["mkv2", "int8"])
def test_other_sizes_of_the_ring(lib, rng, sizes, format):
    sinks, recent, rollback = sizes
    layout = KVLayout(
        format, 1, 32, 32, context=400, sink_tokens=sinks, recent_tokens=recent, rollback_tokens=rollback
    )
    case = make_case(rng, layout, 2, [0, 63, 64, 127, 128, 191, 300])
    for chunk in (1, 66, 1):
        rows = list(range(7))
        case = check_step(lib, case, make_step(rng, case, rows, [chunk] * 7, chunk))


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid", "softmax_after_topk"])
@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_a_bad_hidden_state_spoils_its_own_token_only(lib, rng, scoring, value):
    """Every logit of its router is NaN: it still chooses experts that exist."""
    attrs, tensors, dtype = make_layer(
        rng, scoring=scoring, num_experts=8, top_k=3, num_groups=4, topk_groups=2, group_score="top2",
        num_tokens=(3, 2), chunk=3,
    )  # fmt: skip
    clean = run_moe(lib, tensors, attrs, dtype)
    tensors["hidden"][1, 5] = value
    out = run_moe(lib, tensors, attrs, dtype)
    assert lib.read_error_flag() == 0
    rest = [0, 2, 3, 4, 5]
    np.testing.assert_array_equal(raw(out[rest]), raw(clean[rest]))
    assert not np.isfinite(out[1].astype(F32)).all()


def surrounded(array):
    """A copy of `array` with as many bytes of 0xA5 before and behind it, and a check that they stay."""
    around = np.full(3 * array.nbytes, 0xA5, np.uint8)
    middle = around[array.nbytes : 2 * array.nbytes]
    middle[:] = array.view(np.uint8).reshape(-1)

    def check():
        assert (around[: array.nbytes] == 0xA5).all()
        assert (around[2 * array.nbytes :] == 0xA5).all()

    return middle.view(array.dtype).reshape(array.shape), check


@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize("format", FORMATS)
def test_memory_that_nobody_filled(lib, rng, format, window):
    """As a builder that times the kernels may call them: random bytes in every input, cache and scratch."""
    case = make_case(rng, KVLayout(format, 2, 64, 48, context=300, window=window), 8, [0] * 3)
    step = make_step(rng, case, [0, 1], [1, 1], 40)
    for _ in range(5):
        for tensors in (case.tensors, step):
            for name, array in tensors.items():
                noise = rng.integers(0, 256, array.nbytes).astype(np.uint8)
                tensors[name] = noise.view(array.dtype).reshape(array.shape)
        step["num_tokens"][0] = 40
        step["slot_ids"][:] = rng.permutation(3)[:2]
        case.tensors["lengths"][step["slot_ids"][0]] = rng.integers(0, 300)
        case.tensors["lengths"][step["slot_ids"][1]] = 2**31 - 4  # a window's ring is good for ever
        checks = []
        for name in ("ring", "blocks"):
            case.tensors[name], check = surrounded(case.tensors[name])
            checks.append(check)
        with np.errstate(over="ignore", invalid="ignore"):
            inputs = {name: step[name].astype(np.float16) for name in "qkv"}
        run_attention(lib, {**step, **case.tensors, **inputs}, case.attrs)
        for check in checks:
            check()
    lib.read_error_flag()
