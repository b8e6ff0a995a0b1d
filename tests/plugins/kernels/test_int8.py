"""The cache format int8 in plugins/kernels: state bit for bit, outputs close to moec.reference."""

import ctypes

import numpy as np
import pytest

from moec.reference.kv_block import block_section
from moec.reference.kv_cache import KVLayout
from tests.helpers.kernels import ERROR_NAN, attention_params, library
from tests.helpers.kv_cases import advance, check_step, make_case, make_step, raw, run_kernel, run_reference
from tests.helpers.simt import SCHEDULES, SimtError
from tests.plugins.kernels.test_attention import (
    BOUNDARIES,
    decode_step,
    make_again,
    random_schedule,
)

F32 = np.float32
BUGS = {
    1: "no barrier between the key scales and their use",
    10: "a step is a 128th of the amplitude",
    11: "no barrier between fitting and packing a block",
}


@pytest.mark.parametrize(
    ("k_dim", "v_dim", "dtype"),
    [
        (64, 64, "fp16"),
        (80, 80, "bf16"),
        (96, 64, "fp16"),
        (128, 128, "bf16"),
        (192, 128, "fp16"),
        (64, 256, "bf16"),
        (256, 256, "fp16"),
        (12, 20, "fp16"),
    ],
)
def test_decode_at_block_boundaries(lib, rng, k_dim, v_dim, dtype):
    layout = KVLayout("int8", 1, k_dim, v_dim, context=209)
    case = make_case(rng, layout, 2, BOUNDARIES, dtype=dtype)
    case = check_step(lib, case, decode_step(rng, case), **random_schedule(rng))
    slots = [slot for slot, length in enumerate(case.lengths) if length < 209]
    check_step(lib, case, make_step(rng, case, slots, [1] * len(slots), 1), **random_schedule(rng))


@pytest.mark.parametrize("group", range(1, 17))
def test_grouped_queries(lib, rng, group):
    layout = KVLayout("int8", 2, 64, 48, context=300)
    case = make_case(rng, layout, 2 * group, [215, 9])
    check_step(lib, case, decode_step(rng, case), **random_schedule(rng))


@pytest.mark.parametrize("options", [{"softcap": 3.0}, {"sinks": True}, {"softcap": 2.0, "sinks": True}])
def test_softcap_and_sink_logits(lib, rng, options):
    case = make_case(rng, KVLayout("int8", 2, 64, 64, context=300), 8, [0, 220], **options)
    check_step(lib, case, decode_step(rng, case), **random_schedule(rng))


def test_a_window_has_no_blocks(lib, rng):
    layout = KVLayout("int8", 2, 64, 96, context=300, window=24, rollback_tokens=3)
    case = make_case(rng, layout, 4, [0, 23, 24, 250])
    check_step(lib, case, decode_step(rng, case), **random_schedule(rng))
    check_step(lib, case, make_step(rng, case, [3, 0], [30, 50], 50), **random_schedule(rng))


def test_idle_unequal_and_padded_rows(lib, rng):
    case = make_case(rng, KVLayout("int8", 2, 64, 64, context=300), 4, [140, 0, 200, 60])
    step = make_step(rng, case, [3, 0, 2], [0, 7, 9], 9)
    case = check_step(lib, case, step, **random_schedule(rng))
    check_step(lib, case, make_step(rng, case, [1, 3, 1], [9, 2, 0], 9), **random_schedule(rng))


@pytest.mark.parametrize("start", [0, 100])
def test_chunk_that_overruns_the_ring(lib, rng, start):
    case = make_case(rng, KVLayout("int8", 1, 64, 64, context=400), 2, [start])
    check_step(lib, case, make_step(rng, case, [0], [290], 290), **random_schedule(rng))


def test_chunks_equal_single_steps_bit_for_bit(lib, rng):
    case = make_case(rng, KVLayout("int8", 1, 64, 80, context=300), 3, [190])
    step = make_step(rng, case, [0], [40], 40)
    out, tensors = run_kernel(lib, case, step)
    for i in range(40):
        one = {name: step[name][:, i : i + 1] for name in "qkv"}
        one |= {"slot_ids": step["slot_ids"], "num_tokens": np.ones(1, np.int32)}
        single, after = run_kernel(lib, case, one)
        np.testing.assert_array_equal(raw(single[0, 0]), raw(out[0, i]))
        case = advance(case, one, after)
    np.testing.assert_array_equal(raw(case.tensors["ring"]), raw(tensors["ring"]))
    np.testing.assert_array_equal(case.tensors["blocks"], tensors["blocks"])


def test_rollback_to_before_a_flush(lib, rng):
    """Eight guessed tokens finish a block, five are taken back and others come: as without the guess."""
    case = make_case(rng, KVLayout("int8", 1, 64, 64, context=300, rollback_tokens=8), 2, [140])
    right, wrong = (make_step(rng, case, [0], [8], 8) for _ in range(2))
    for name in "qkv":
        wrong[name][:, :3] = right[name][:, :3]
    after = advance(case, wrong, run_kernel(lib, case, wrong)[1])
    back = make_again(after, after.tensors)
    back.tensors["lengths"] = after.tensors["lengths"] - 5
    rest = {name: np.ascontiguousarray(right[name][:, 3:]) for name in "qkv"}
    rest |= {"slot_ids": right["slot_ids"], "num_tokens": np.array([5], np.int32)}
    out, tensors = run_kernel(lib, back, rest)
    want, want_tensors = run_kernel(lib, case, right)
    np.testing.assert_array_equal(raw(out[0]), raw(want[0, 3:]))
    np.testing.assert_array_equal(tensors["blocks"][:, :, 0], want_tensors["blocks"][:, :, 0])


def extreme(rng, name, shape):
    """Float32 numbers `[b,S,H,D]` that bf16 represents, some channels and some tokens of them extreme."""
    x = rng.standard_normal(shape).astype(F32)
    if name == "constant":
        x[..., ::2] = F32(0.75)
        x[..., 1::4] = F32(0)
    elif name == "outliers":
        x *= np.where(rng.random(shape) < 0.01, F32(3e4), F32(1))
        x[..., 5] *= F32(1e30)
    elif name == "denormals":
        x *= F32(2.0) ** rng.choice([-149, -130, -126, -30, -24, -14, 0], shape).astype(F32)
    elif name == "infinite":
        x[rng.random(shape) < 0.02] = np.inf
        x[rng.random(shape) < 0.02] = -np.inf
    elif name == "single-signed":
        x = np.abs(x) + F32(100)
        x[..., ::2] *= F32(-1)
    elif name == "powers of two":  # every amplitude is an E4M3 value, every code at a border
        x = np.sign(x) * F32(2.0) ** rng.integers(-10, 9, shape).astype(F32)
    elif name == "zeros":
        x[:] = np.where(x < 0, F32(-0.0), F32(0))
    return x


@pytest.mark.parametrize(
    "name",
    ["constant", "outliers", "denormals", "infinite", "single-signed", "powers of two", "zeros"],
)
@pytest.mark.parametrize("v_dim", [64, 48])
def test_extreme_numbers(lib, rng, name, v_dim):
    """Blocks of them in one chunk, then a query over those blocks; nothing becomes NaN."""
    layout = KVLayout("int8", 2, 64, v_dim, context=300)
    case = make_case(rng, layout, 4, [0], dtype="bf16")
    step = make_step(rng, case, [0], [215], 215)
    with np.errstate(over="ignore"):
        step["k"], step["v"] = (
            extreme(rng, name, step[x].shape).astype("bfloat16").astype(F32) for x in "kv"
        )
    step["q"] *= F32(2**-7)  # no query is decided by one token alone
    _, blocks, ring = run_reference(case, step)
    _, tensors = run_kernel(lib, case, step, **random_schedule(rng))
    np.testing.assert_array_equal(raw(tensors["ring"]), raw(ring))
    np.testing.assert_array_equal(tensors["blocks"], blocks)
    assert lib.read_error_flag() == 0
    case = advance(case, step, tensors)
    query = decode_step(rng, case)
    query["q"] *= F32(2**-7)
    expected, _, _ = run_reference(case, query)
    out, _ = run_kernel(lib, case, query, **random_schedule(rng))
    assert np.isfinite(expected).all()
    assert np.isfinite(out.astype(F32)).all()
    if name != "infinite" and name != "outliers":  # there logits are too large for 1e-4
        check_step(lib, case, query, **random_schedule(rng))


def test_references_at_the_ends_of_their_range(lib, rng):
    """The quotient by a tiny reference overflows, that by a huge one is a denormal; codes stay in range."""
    layout = KVLayout("int8", 1, 64, 128, context=300)
    case = make_case(rng, layout, 1, [140])
    case.tensors["v_ref"][:] = F32(2.0) ** np.array([[-120, 120]], F32)
    case.tensors["k_ref"][:, :3] = F32(2.0) ** np.array([-120, 120, -14], F32)
    step = make_step(rng, case, [0], [12], 12)
    _, blocks, ring = run_reference(case, step)
    _, tensors = run_kernel(lib, case, step)
    np.testing.assert_array_equal(raw(tensors["ring"]), raw(ring))
    np.testing.assert_array_equal(tensors["blocks"], blocks)
    codes = block_section(layout, tensors["blocks"][0, 0, 0], "v_codes").view(np.int8)
    assert codes.min() >= -127
    assert np.abs(codes[:, :64]).max() == 127


@pytest.mark.parametrize("name", ["k", "v"])
def test_nan_raises_the_sticky_flag_and_stays_out(lib, rng, name):
    case = make_case(rng, KVLayout("int8", 1, 64, 64, context=300), 1, [140])
    step = make_step(rng, case, [0], [8], 8)
    step[name][0, 1, 0, 17] = np.nan
    out, tensors = run_kernel(lib, case, step)
    assert lib.read_error_flag() == ERROR_NAN
    assert np.isfinite(out.astype(F32)).all()
    case = advance(case, step, tensors)
    out, _ = run_kernel(lib, case, decode_step(rng, case))
    assert lib.read_error_flag() == 0
    assert np.isfinite(out.astype(F32)).all()


def step_passes(lib, rng, schedule):
    for length in (143, 207, 330):
        case = make_case(rng, KVLayout("int8", 1, 128, 128, context=400), 4, [length, 100])
        check_step(lib, case, make_step(rng, case, [0, 1], [1, 1], 1), schedule)


def fails(lib, rng, schedule):
    try:
        step_passes(lib, rng, schedule)
    except (AssertionError, SimtError):
        return True
    return False


@pytest.mark.parametrize("bug", BUGS)
def test_planted_bug_is_found(rng, bug):
    buggy = library(bug)
    assert any([fails(buggy, rng, schedule) for schedule in SCHEDULES])


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_real_kernels_pass_the_same_check(lib, rng, schedule):
    step_passes(lib, rng, schedule)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_bytes": 2560}, b"size of a block"),
        ({"promoted": 16}, b"int8 promotes no channels"),
        ({"ring_rows": 143}, b"ring must have"),
        ({"format": 5}, b"KV format must be mkv2, mkv2_lean, k4v2, int8 or fp16"),
    ],
)
def test_check_names_what_is_wrong(lib, rng, change, message):
    case = make_case(rng, KVLayout("int8", 2, 64, 64, context=300), 4, [0])
    params = attention_params({**decode_step(rng, case), **case.tensors}, case.attrs, "fp16", None)
    assert lib.check_attention(ctypes.byref(params)) is None
    for name, value in change.items():
        setattr(params, name, value)
    assert message in lib.check_attention(ctypes.byref(params))
    assert lib.parse_format(b"int8") == 4
