"""The kernels on a real GPU: the emulator's own tests with the GPU's library, and CUDA graphs.

Imported tests take the `lib` and `rng` fixtures of this folder, so every case and bound is the emulator's:
state bytes equal to moec.reference, outputs up to the rounding of the activation type. Where they run one
call under several schedules, here they run it several times and compare the bits. The harness puts guard
bytes behind every array and the workspace.
"""

from __future__ import annotations

import numpy as np
import pytest

from moec.reference.kv_cache import KVLayout
from tests.helpers.kernels import run_linear, run_moe, run_norm
from tests.helpers.kv_cases import check_step, make_case, make_step, raw, run_kernel
from tests.plugins.kernels import test_add_rms_norm, test_moe, test_quantized_linear
from tests.plugins.kernels.test_add_rms_norm import (  # noqa: F401 (collected here)
    test_rows_of_zeros_and_large_sums,
    test_sum_and_norm,
)
from tests.plugins.kernels.test_attention import (  # noqa: F401 (collected here)
    decode_step,
    make_again,
    test_bad_slots_are_idle_and_flagged,
    test_chunk_that_overruns_the_ring,
    test_chunks_equal_single_steps_bit_for_bit,
    test_decode_at_block_boundaries,
    test_e4m3_as_reference,
    test_grouped_queries,
    test_huge_values_are_clamped,
    test_idle_unequal_and_padded_rows,
    test_launcher_refuses_what_check_refuses,
    test_nan_raises_the_sticky_flag,
    test_neighbours_and_schedules_do_not_change_bits,
    test_own_error_flag,
    test_replay_is_idempotent,
    test_rollback,
    test_softcap_and_sink_logits,
    test_window,
    test_window_longer_than_the_context,
)
from tests.plugins.kernels.test_moe import (  # noqa: F401 (collected here)
    test_activation_functions,
    test_bad_ids_are_skipped_and_flagged,
    test_every_activation,
    test_every_router,
    test_experts_with_given_ids,
    test_hidden_types_differ_only_by_rounding,
    test_many_experts,
    test_padding_and_idle_rows_are_zero,
    test_shapes_with_tails,
    test_ties_go_to_the_lower_id,
)
from tests.plugins.kernels.test_quantized_linear import test_product  # noqa: F401 (collected here)

test_experts_do_not_depend_on_neighbours = test_moe.test_neighbours_and_schedules_do_not_change_bits
test_products_do_not_depend_on_neighbours = (
    test_quantized_linear.test_neighbours_and_schedules_do_not_change_bits
)
test_norms_do_not_depend_on_neighbours = test_add_rms_norm.test_neighbours_and_schedules_do_not_change_bits


@pytest.mark.parametrize("format", ["mkv2", "mkv2_lean", "k4v2", "int8", "fp16"])
@pytest.mark.parametrize("window", [0, 24])
@pytest.mark.parametrize("chunk", [1, 9])
def test_graph_of_attention_equals_a_launch(lib, rng, format, window, chunk):
    """Captured, then replayed. A step of one token also gives the same again, as lengths do not change; a
    chunk does not: its later tokens overwrite ring rows that its earlier queries read."""
    layout = KVLayout(format, 2, 64, 64, context=300, window=window)
    case = make_case(rng, layout, 4, [143, 20, 207])
    step = make_step(rng, case, [2, 0, 1], [chunk, chunk, 0], chunk)
    out, tensors = run_kernel(lib, case, step)
    for replays in (1, 3) if chunk == 1 else (1,):
        lib.set_replays(replays)
        again, state = run_kernel(lib, case, step)
        np.testing.assert_array_equal(raw(again), raw(out))
        np.testing.assert_array_equal(raw(state["ring"]), raw(tensors["ring"]))
        np.testing.assert_array_equal(state["blocks"], tensors["blocks"])


def test_graph_of_attention_as_reference(lib, rng):
    layout = KVLayout("mkv2", 2, 128, 128, context=300)
    case = make_case(rng, layout, 8, [143, 0, 290], dtype="bf16")
    lib.set_replays(2)
    check_step(lib, case, decode_step(rng, case))


@pytest.mark.parametrize("name", ["k", "v"])
def test_graph_raises_the_sticky_flag(lib, rng, name):
    case = make_case(rng, KVLayout("mkv2", 1, 64, 64, context=300), 1, [10])
    step = decode_step(rng, case)
    step[name][0, 0, 0, 17] = np.nan
    lib.set_replays(2)
    run_kernel(lib, case, step)
    assert lib.read_error_flag() == 1


@pytest.mark.parametrize("weight_format", ["int4", "bf16"])
@pytest.mark.parametrize("given_ids", [False, True])
def test_graph_of_experts_equals_a_launch(lib, rng, weight_format, given_ids):
    attrs, tensors, dtype = test_moe.make_layer(rng, weight_format=weight_format, has_bias=1)
    if given_ids:
        tensors["ids"] = np.stack([rng.permutation(8)[:2] for _ in tensors["hidden"]]).astype(np.int32)
        tensors["weights"] = rng.standard_normal(tensors["ids"].shape).astype(np.float32)
    out = run_moe(lib, tensors, attrs, dtype)
    lib.set_replays(3)
    np.testing.assert_array_equal(raw(run_moe(lib, tensors, attrs, dtype)), raw(out))


@pytest.mark.parametrize("bits", [4, 8])
def test_graph_of_a_product_equals_a_launch(lib, rng, bits):
    x, codes, scales, _ = test_quantized_linear.make(rng, 5, 200, 33, bits, "bf16")
    out = run_linear(lib, x, codes, scales, bits, "bf16")
    lib.set_replays(3)
    np.testing.assert_array_equal(raw(run_linear(lib, x, codes, scales, bits, "bf16")), raw(out))


def test_graph_of_a_norm_equals_a_launch(lib, rng):
    inputs = test_add_rms_norm.make(rng, 5, 300, "bf16")
    before = run_norm(lib, *inputs, 1e-6, "bf16")
    lib.set_replays(3)
    for again, first in zip(run_norm(lib, *inputs, 1e-6, "bf16"), before, strict=True):
        np.testing.assert_array_equal(raw(again), raw(first))


def test_large_shapes(lib, rng):
    """More CTAs than an SM holds, many splits and several passes: what the emulator is too slow for."""
    layout = KVLayout("mkv2", 4, 128, 128, context=8192)
    case = make_case(rng, layout, 32, [8000, 4099])
    case = check_step(lib, case, decode_step(rng, case))
    check_step(lib, case, make_step(rng, case, [1], [128], 128))
    layer = test_moe.make_layer(
        rng, hidden_size=768, intermediate_size=512, num_experts=32, top_k=8, num_tokens=(64, 17), chunk=64
    )
    test_moe.check_layer(lib, rng, *layer)
