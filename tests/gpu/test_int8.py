"""The cache format int8 on a real GPU: the emulator's own tests with the GPU's library."""

from __future__ import annotations

from moec.reference.kv_cache import KVLayout
from tests.helpers.kv_cases import check_step, make_case, make_step
from tests.plugins.kernels.test_attention import decode_step
from tests.plugins.kernels.test_int8 import (  # noqa: F401 (collected here)
    test_a_window_has_no_blocks,
    test_chunk_that_overruns_the_ring,
    test_chunks_equal_single_steps_bit_for_bit,
    test_decode_at_block_boundaries,
    test_extreme_numbers,
    test_grouped_queries,
    test_idle_unequal_and_padded_rows,
    test_nan_raises_the_sticky_flag_and_stays_out,
    test_references_at_the_ends_of_their_range,
    test_rollback_to_before_a_flush,
    test_softcap_and_sink_logits,
)


def test_large_shapes(lib, rng):
    """More CTAs than an SM holds, many splits and several passes."""
    case = make_case(rng, KVLayout("int8", 4, 128, 128, context=8192), 32, [8000, 4099])
    case = check_step(lib, case, decode_step(rng, case))
    check_step(lib, case, make_step(rng, case, [1], [128], 128))
