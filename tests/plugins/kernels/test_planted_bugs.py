"""Mistakes planted into the real kernels (MOEC_PLANT_BUG) must fail the checks that the real ones pass."""

import numpy as np
import pytest

from moec.reference.kv_cache import KVLayout
from tests.helpers.kernels import library, run_moe, run_norm
from tests.helpers.kv_cases import assert_close, check_step, make_case, make_step
from tests.helpers.simt import SCHEDULES, SimtError
from tests.plugins.kernels import test_add_rms_norm
from tests.plugins.kernels.test_moe import make_layer, reference

ATTENTION_BUGS = {
    1: "no barrier between the key scales and their use",
    2: "no barrier between probabilities and values",
    3: "promoted channels quantized with two bits",
    4: "no barrier between the strides of the rotation",
    5: "no barrier between fitting and packing a block",
    6: "the warp sum stops one step early",
    7: "a query sees a block one step early",
}
NORM_BUGS = {6: "the warp sum stops one step early", 9: "no barrier between the warps' sums and their sum"}
MOE_BUGS = {6: "the warp sum stops one step early", 8: "no barrier between router logits and their use"}


def attention_passes(lib, rng, schedule):
    layout = KVLayout("mkv2", 1, 128, 128, context=400)
    for length in (143, 207, 330):
        case = make_case(rng, layout, 4, [length, 100])
        step = make_step(rng, case, [0, 1], [1, 1], 1)
        check_step(lib, case, step, schedule, seed=int(rng.integers(1 << 30)))


def moe_passes(lib, rng, schedule):
    attrs, tensors, dtype = make_layer(rng, hidden_size=128, num_experts=16)
    assert_close(run_moe(lib, tensors, attrs, dtype, schedule), reference(attrs, tensors))


def norm_passes(lib, rng, schedule):
    inputs = test_add_rms_norm.make(rng, 3, 500, "fp16")
    out, _ = run_norm(lib, *inputs, 1e-6, "fp16", schedule=schedule)
    assert_close(out, test_add_rms_norm.reference(*inputs, 1e-6)[0])


def fails(check, lib, rng, schedule):
    try:
        check(lib, rng, schedule)
    except (AssertionError, SimtError):
        return True
    return False


@pytest.mark.parametrize(
    ("bug", "check"),
    [
        *((bug, attention_passes) for bug in ATTENTION_BUGS),
        *((bug, moe_passes) for bug in MOE_BUGS),
        *((bug, norm_passes) for bug in NORM_BUGS),
    ],
)
def test_bug_is_found(rng, bug, check):
    buggy = library(bug)
    assert any([fails(check, buggy, rng, schedule) for schedule in SCHEDULES])


@pytest.mark.parametrize("check", [attention_passes, moe_passes, norm_passes])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_real_kernels_pass_the_same_checks(lib, rng, check, schedule):
    check(lib, np.random.default_rng(rng.integers(1 << 60)), schedule)
