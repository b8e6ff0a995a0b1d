"""The SIMT emulator: right kernels pass under every schedule, planted mistakes are found."""

import ctypes
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from tests.helpers.simt import SCHEDULES, SimtError, compile_simt, pointer

CASES = Path(__file__).parent / "cases.cpp"


@pytest.fixture(scope="module", params=["native", "portable"])
def library(request):
    """The emulator with F16C and assembler fibers, and with the portable halves and ucontext."""
    if request.param == "native":
        return compile_simt(CASES)
    return compile_simt(CASES, ("-DSIMT_USE_UCONTEXT",), f16c=False)


@pytest.fixture
def rng():
    seed = np.random.SeedSequence().entropy
    print("seed", seed)
    return np.random.default_rng(seed)


def run(library, name, values, size, bug=0, schedule=0):
    out = np.zeros(size, np.float32)
    message = ctypes.create_string_buffer(600)
    values = np.ascontiguousarray(values, np.float32)
    rc = library.run_case(name.encode(), bug, schedule, pointer(values), pointer(out), message, 600)
    assert rc != 2, f"no case {name}"
    if rc:
        raise SimtError(message.value.decode())
    return out


def found(library, name, values, expected, bug):
    """Whether any schedule turns the planted bug into an error or a wrong value."""

    def wrong(schedule):
        try:
            return not np.allclose(
                run(library, name, values, expected.size, bug, schedule), expected, rtol=1e-5
            )
        except SimtError:
            return True

    return any(wrong(schedule) for schedule in SCHEDULES)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_block_sum(library, rng, schedule):
    x = rng.standard_normal((3, 64)).astype(np.float32)
    np.testing.assert_allclose(
        run(library, "block_sum", x, 3, schedule=schedule), x.sum(1), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("bug", [1, 2])
def test_block_sum_bugs_are_found(library, rng, bug):
    x = rng.uniform(1, 2, (3, 64)).astype(np.float32)
    assert found(library, "block_sum", x, x.sum(1), bug)


def rotated_tiles(x):
    return np.roll(x.reshape(4, 64), -1, axis=1).ravel()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_async_copies_arrive_at_the_wait(library, rng, schedule):
    x = rng.standard_normal(256).astype(np.float32)
    np.testing.assert_array_equal(run(library, "async_tiles", x, 256, schedule=schedule), rotated_tiles(x))


@pytest.mark.parametrize("bug", [1, 2, 3])
def test_async_bugs_are_found(library, rng, bug):
    x = rng.standard_normal(256).astype(np.float32)
    assert found(library, "async_tiles", x, rotated_tiles(x), bug)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_collectives(library, rng, schedule):
    x = rng.standard_normal(32).astype(np.float32)
    out = run(library, "collectives", x, 32 * 7, schedule=schedule).reshape(32, 7)
    lane = np.arange(32)
    np.testing.assert_allclose(out[:, 0], x.sum(), rtol=1e-4, atol=1e-5)
    np.testing.assert_array_equal(out[:, 1], x[(lane + 3) % 32])
    np.testing.assert_array_equal(out[:, 2], x[np.where(lane % 8 < 2, lane, lane - 2)])
    np.testing.assert_array_equal(out[:, 3], x[np.minimum(lane + 1, 31)])
    np.testing.assert_array_equal(out[:, 4], float(sum(1 << int(i) for i in lane[:24][x[:24] > 0])))
    np.testing.assert_array_equal(out[:, 5:], np.tile([31.0 + 32.0, 3.0], (32, 1)))


@pytest.mark.parametrize(
    ("case", "bug", "message"),
    [
        ("collectives", 1, "divergent warp collective"),
        ("collectives", 3, "not in mask"),
        ("lonely", 1, "deadlock"),
        ("collectives", 2, "exited"),
        ("lonely", 2, "exited"),
        ("shared_edges", 1, "past the end of dynamic shared memory"),
        ("too_many_threads", 0, "launch limits"),
        ("too_much_shared", 0, "launch limits"),
    ],
)
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_misuse_is_an_error(library, case, bug, message, schedule):
    with pytest.raises(SimtError, match=message):
        run(library, case, np.zeros(64), 64 * 7, bug, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_barriers_with_votes(library, schedule):
    out = run(library, "lonely", np.zeros(64), 64, schedule=schedule)
    np.testing.assert_array_equal(out, 32 + 100)


def test_shared_memory_starts_poisoned(library):
    assert np.isnan(run(library, "shared_edges", np.zeros(64), 64)).all()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_atomics(library, rng, schedule):
    x = rng.standard_normal(64).astype(np.float32)
    out = run(library, "atomics", x, 7, schedule=schedule)
    np.testing.assert_array_equal(out[:6].view(np.int32), [64 * 63 // 2, 63, -63, 2**20 - 1, 77, 5])
    np.testing.assert_allclose(out[6], x.sum(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("bug", "dtype"), [(0, np.float16), (1, ml_dtypes.bfloat16)])
def test_mma(library, rng, bug, dtype):
    a, b = rng.standard_normal((16, 16)), rng.standard_normal((16, 8))
    values = np.concatenate([a.ravel(), b.ravel()])
    out = run(library, "mma", values, 128, bug, schedule=2).reshape(16, 8)
    a, b = a.astype(np.float32).astype(dtype), b.astype(np.float32).astype(dtype)
    np.testing.assert_allclose(out, 1 + a.astype(np.float64) @ b.astype(np.float64), rtol=1e-5, atol=1e-5)


def test_every_half_converts_as_numpy(library):
    bits = np.arange(65536, dtype=np.uint16)
    half, bf16 = np.empty(65536, np.float32), np.empty(65536, np.float32)
    library.halves_to_floats(pointer(bits), pointer(half), pointer(bf16), 65536)
    np.testing.assert_array_equal(half, bits.view(np.float16).astype(np.float32))
    np.testing.assert_array_equal(bf16, bits.view(ml_dtypes.bfloat16).astype(np.float32))


def test_floats_round_as_numpy(library, rng):
    x = rng.integers(0, 2**32, 300_000, dtype=np.uint32).view(np.float32)
    halves = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    halves = halves[np.isfinite(halves)]
    near = np.concatenate([halves, np.nextafter(halves, np.float32(9e9)), halves * np.float32(1.00048828125)])
    x = np.concatenate([x, near, np.float32([65519.99, 65520, -65520, 1e-8, 2.98e-8, 2.9802322e-8, 0, -0.0])])
    x = np.ascontiguousarray(x[~np.isnan(x)])
    half, bf16 = np.empty(x.size, np.uint16), np.empty(x.size, np.uint16)
    library.floats_to_halves(pointer(x), pointer(half), pointer(bf16), x.size)
    with np.errstate(over="ignore"):
        np.testing.assert_array_equal(half, x.astype(np.float16).view(np.uint16))
    np.testing.assert_array_equal(bf16, x.astype(ml_dtypes.bfloat16).view(np.uint16))
