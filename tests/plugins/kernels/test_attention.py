"""plugins/kernels/kv_*: append, flush and attend under the emulator against moec.reference."""

import ctypes

import numpy as np
import pytest

from moec.reference.e4m3 import E4M3_VALUES, e4m3_rne, e4m3_up
from moec.reference.kv_cache import KVLayout
from tests.helpers.kernels import ERROR_CAPACITY, ERROR_NAN, attention_params, run_attention
from tests.helpers.kv_cases import advance, check_step, make_case, make_step, raw, run_kernel
from tests.helpers.simt import SCHEDULES, SimtError, pointer

# Around every change of the state: sinks end at 16, block i is flushed when 144 + 64*i tokens are cached.
BOUNDARIES = [0, 1, 15, 16, 17, 63, 64, 65, 79, 80, 127, 128, 129, 142, 143, 144, 145, 207, 208]


def decode_step(rng, case):
    slots = rng.permutation(len(case.lengths)).tolist()
    return make_step(rng, case, slots, [1] * len(slots), 1)


def random_schedule(rng):
    return {"schedule": int(rng.integers(3)), "seed": int(rng.integers(1 << 30))}


def test_e4m3_as_reference(lib, rng):
    x = rng.standard_normal(50_000).astype(np.float32) * np.float32(2.0) ** rng.integers(-14, 12, 50_000)
    x = np.concatenate(
        [x.astype(np.float32), E4M3_VALUES[:127], -E4M3_VALUES[:127], np.float32([449, 1e9, 0, -0.0])]
    )
    near = np.concatenate([np.nextafter(x, np.float32(1e9)), np.nextafter(x, np.float32(-1e9))])
    middles = (E4M3_VALUES[:126] + E4M3_VALUES[1:127]) / np.float32(2)
    x = np.ascontiguousarray(np.concatenate([x, near, middles, -middles]).astype(np.float32))
    up, rne, values = np.empty(x.size, np.uint8), np.empty(x.size, np.uint8), np.empty(256, np.float32)
    lib.e4m3_codes(pointer(x), pointer(up), pointer(rne), x.size)
    lib.e4m3_values(pointer(values))
    np.testing.assert_array_equal(up, e4m3_up(x))
    np.testing.assert_array_equal(rne, e4m3_rne(x))
    finite = np.isfinite(E4M3_VALUES)
    np.testing.assert_array_equal(values[finite], E4M3_VALUES[finite])


@pytest.mark.parametrize(
    ("k_dim", "v_dim", "format", "dtype"),
    [
        (64, 64, "mkv2", "fp16"),
        (96, 96, "mkv2", "bf16"),
        (128, 128, "mkv2_lean", "fp16"),
        (256, 256, "mkv2", "bf16"),
        (192, 128, "k4v2", "fp16"),
        (64, 80, "mkv2", "bf16"),
        (128, 64, "fp16", "fp16"),
    ],
)
def test_decode_at_block_boundaries(lib, rng, k_dim, v_dim, format, dtype):
    layout = KVLayout(format, 1, k_dim, v_dim, context=209)
    case = make_case(rng, layout, 2, BOUNDARIES, dtype=dtype)
    case = check_step(lib, case, decode_step(rng, case), **random_schedule(rng))
    full = case.lengths.index(209)
    slots = [slot for slot in range(len(case.lengths)) if slot != full]
    check_step(lib, case, make_step(rng, case, slots, [1] * len(slots), 1), **random_schedule(rng))


@pytest.mark.parametrize("group", [1, 2, 3, 4, 5, 7, 8, 12, 16])
def test_grouped_queries(lib, rng, group):
    layout = KVLayout("mkv2", 2, 64, 64, context=300)
    case = make_case(rng, layout, 2 * group, [150, 9])
    check_step(lib, case, decode_step(rng, case), **random_schedule(rng))


@pytest.mark.parametrize("format", ["mkv2", "fp16"])
@pytest.mark.parametrize("rollback", [0, 7])
def test_window(lib, rng, format, rollback):
    layout = KVLayout(format, 2, 64, 96, context=100, window=24, rollback_tokens=rollback)
    case = make_case(rng, layout, 4, [0, 1, 23, 24, 25, 31, 48, 99])
    check_step(lib, case, decode_step(rng, case), **random_schedule(rng))
    case = make_case(rng, layout, 4, [11, 40])
    check_step(lib, case, make_step(rng, case, [1, 0], [50, 33], 50), **random_schedule(rng))


def test_window_longer_than_the_context(lib, rng):
    layout = KVLayout("mkv2", 1, 64, 64, context=40, window=1000)
    case = make_case(rng, layout, 2, [0, 39])
    check_step(lib, case, decode_step(rng, case))


@pytest.mark.parametrize("format", ["mkv2", "fp16"])
@pytest.mark.parametrize(("softcap", "sinks"), [(3.0, False), (0.0, True), (2.0, True)])
def test_softcap_and_sink_logits(lib, rng, format, softcap, sinks):
    layout = KVLayout(format, 2, 64, 64, context=260)
    case = make_case(rng, layout, 8, [0, 150], softcap=softcap, sinks=sinks)
    check_step(lib, case, decode_step(rng, case), **random_schedule(rng))


def test_idle_unequal_and_padded_rows(lib, rng):
    layout = KVLayout("mkv2", 2, 64, 64, context=300)
    case = make_case(rng, layout, 4, [140, 0, 200, 60])
    step = make_step(rng, case, [3, 0, 2], [0, 7, 3], 9)
    case = check_step(lib, case, step, **random_schedule(rng))
    check_step(lib, case, make_step(rng, case, [1, 3, 1], [9, 2, 0], 9), **random_schedule(rng))


@pytest.mark.parametrize("start", [0, 100])
def test_chunk_that_overruns_the_ring(lib, rng, start):
    layout = KVLayout("mkv2", 1, 64, 64, context=400)
    case = make_case(rng, layout, 2, [start])
    check_step(lib, case, make_step(rng, case, [0], [230], 230), **random_schedule(rng))


def test_chunks_equal_single_steps_bit_for_bit(lib, rng):
    layout = KVLayout("mkv2", 1, 64, 64, context=300)
    case = make_case(rng, layout, 3, [120])
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


def test_neighbours_and_schedules_do_not_change_bits(lib, rng):
    layout = KVLayout("mkv2", 2, 64, 64, context=300)
    case = make_case(rng, layout, 4, [160, 30, 210])
    step = make_step(rng, case, [2, 0, 1], [1, 1, 1], 1)
    outs = [run_kernel(lib, case, step, schedule, seed=5)[0] for schedule in SCHEDULES]
    for other in outs[1:]:
        np.testing.assert_array_equal(raw(other), raw(outs[0]))
    for row in range(3):
        alone = {name: step[name][row : row + 1] for name in step}
        np.testing.assert_array_equal(raw(run_kernel(lib, case, alone)[0][0]), raw(outs[0][row]))


def test_replay_is_idempotent(lib, rng):
    layout = KVLayout("mkv2", 1, 64, 64, context=300)
    case = make_case(rng, layout, 2, [143, 207, 20])
    step = decode_step(rng, case)
    out, tensors = run_kernel(lib, case, step)
    again = make_again(case, tensors)
    out_again, tensors_again = run_kernel(lib, again, step)
    np.testing.assert_array_equal(raw(out), raw(out_again))
    np.testing.assert_array_equal(raw(tensors["ring"]), raw(tensors_again["ring"]))
    np.testing.assert_array_equal(tensors["blocks"], tensors_again["blocks"])


def make_again(case, tensors):
    """The state after a step, with the lengths before it."""
    return type(case)(**{**vars(case), "tensors": {**tensors, "lengths": case.tensors["lengths"]}})


@pytest.mark.parametrize("back", [1, 5, 8])
def test_rollback(lib, rng, back):
    layout = KVLayout("mkv2", 1, 64, 64, context=300, rollback_tokens=8)
    case = make_case(rng, layout, 2, [140])
    straight = make_step(rng, case, [0], [8], 8)
    wrong = make_step(rng, case, [0], [8], 8)
    for name in "qkv":  # the guess is right for the tokens that stay
        wrong[name][:, : 8 - back] = straight[name][:, : 8 - back]
    after = advance(case, wrong, run_kernel(lib, case, wrong)[1])
    back_case = make_again(after, after.tensors)
    back_case.tensors["lengths"] = after.tensors["lengths"] - back
    rest = {name: np.ascontiguousarray(straight[name][:, 8 - back :]) for name in "qkv"}
    rest |= {"slot_ids": straight["slot_ids"], "num_tokens": np.array([back], np.int32)}
    out, tensors = run_kernel(lib, back_case, rest)
    want, want_tensors = run_kernel(lib, case, straight)
    np.testing.assert_array_equal(raw(out[0]), raw(want[0, 8 - back :]))
    np.testing.assert_array_equal(tensors["blocks"][:, :, 0], want_tensors["blocks"][:, :, 0])
    live = layout.ring_row(np.arange(148 - 84, 148))
    np.testing.assert_array_equal(raw(tensors["ring"][:, :, live]), raw(want_tensors["ring"][:, :, live]))


def test_huge_values_are_clamped(lib, rng):
    layout = KVLayout("mkv2", 1, 64, 64, context=300)
    case = make_case(rng, layout, 1, [10], dtype="bf16")
    step = decode_step(rng, case)
    step["v"][..., 3], step["k"][..., 5] = 1e30, np.inf
    _, tensors = run_kernel(lib, case, step)
    assert np.isfinite(tensors["ring"][:, :, :11].astype(np.float32)).all()
    assert lib.read_error_flag() == 0


@pytest.mark.parametrize("name", ["k", "v"])
def test_nan_raises_the_sticky_flag(lib, rng, name):
    layout = KVLayout("mkv2", 1, 64, 64, context=300)
    case = make_case(rng, layout, 1, [10])
    step = decode_step(rng, case)
    step[name][0, 0, 0, 17] = np.nan
    run_kernel(lib, case, step)
    run_kernel(lib, case, decode_step(rng, case))
    assert lib.read_error_flag() == ERROR_NAN
    assert lib.read_error_flag() == 0


def test_own_error_flag(lib, rng):
    layout = KVLayout("fp16", 1, 64, 64, context=11)
    case = make_case(rng, layout, 1, [10])
    step = make_step(rng, case, [0], [2], 2)
    flag = np.zeros(1, np.int32)
    inputs = {name: step[name].astype(np.float16) for name in "qkv"}
    out = run_attention(lib, {**step, **case.tensors, **inputs, "error_flag": flag}, case.attrs)
    assert flag[0] == ERROR_CAPACITY
    assert lib.read_error_flag() == 0
    assert np.abs(out[0, 0]).max() > 0
    assert not out[0, 1].any()


@pytest.mark.parametrize(("slot", "length"), [(5, 3), (-1, 3), (0, -4), (0, 271)])
def test_bad_slots_are_idle_and_flagged(lib, rng, slot, length):
    layout = KVLayout("mkv2", 1, 64, 64, context=208)  # one block: the state can hold 271 tokens
    case = make_case(rng, layout, 1, [100])
    step = make_step(rng, case, [0], [1], 1)
    case.tensors["lengths"][0], step["slot_ids"][0] = length, slot
    out, tensors = run_kernel(lib, case, step)
    assert lib.read_error_flag() == ERROR_CAPACITY
    assert not out.any()
    np.testing.assert_array_equal(raw(tensors["ring"]), raw(case.tensors["ring"]))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"block_tokens": 32}, b"block_tokens"),
        ({"ring_rows": 143}, b"ring must have"),
        ({"block_bytes": 2432}, b"size of a block"),
        ({"num_heads": 3}, b"multiple of the number of KV heads"),
        ({"k_dim": 66}, b"multiples of 4"),
        ({"v_dim": 1024}, b"above 512"),
        ({"promoted": 6}, b"promoted"),
        ({"format": 5}, b"KV format"),
        ({"dtype": 2}, b"fp16 or bf16"),
        ({"rows": 0}, b"not positive"),
        ({"window": -1}, b"negative"),
        ({"format": 3, "window": 100}, b"windowed"),
    ],
)
def test_check_names_what_is_wrong(lib, rng, change, message):
    layout = KVLayout("mkv2", 2, 64, 64, context=300)
    case = make_case(rng, layout, 4, [0])
    step = make_step(rng, case, [0], [1], 1)
    params = attention_params({**step, **case.tensors}, case.attrs, "fp16", None)
    assert lib.check_attention(ctypes.byref(params)) is None
    for name, value in change.items():
        setattr(params, name, value)
    assert message in lib.check_attention(ctypes.byref(params))


def test_launcher_refuses_what_check_refuses(lib, rng):
    case = make_case(rng, KVLayout("mkv2", 1, 64, 64, context=300), 1, [0])
    step = decode_step(rng, case)
    inputs = {name: step[name].astype(np.float16) for name in "qkv"}
    with pytest.raises(SimtError, match="returned 1"):
        run_attention(lib, {**step, **case.tensors, **inputs}, {**case.attrs, "block_tokens": 32})
    assert lib.parse_format(b"fp32") == -1
    assert lib.parse_format(b"k4v2") == 2
