from __future__ import annotations

import numpy as np
import pytest

from moec.errors import MoecError
from moec.reference.kv_cache import (
    Calibration,
    KVLayout,
    KVState,
    hadamard,
    neutral_calibration,
    prepare_rows,
    quantize_block,
)
from tests.helpers.rng import fresh_rng


def random_calibration(rng: np.random.Generator, layout: KVLayout) -> Calibration:
    heads, dim = layout.num_kv_heads, layout.k_dim
    order = np.stack([rng.permutation(dim) for _ in range(heads)]).astype(np.int32)
    return Calibration(
        rng.standard_normal((heads, dim)).astype(np.float32),
        (2.0 ** rng.integers(-1, 2, (heads, dim))).astype(np.float32),
        order,
        (2.0 ** rng.integers(-1, 2, (heads, layout.num_v_groups))).astype(np.float32),
    )


def test_rows_are_centred_permuted_scaled_and_rotated():
    rng = fresh_rng()
    layout = KVLayout("mkv2", 2, 64, 64, 400)
    c = random_calibration(rng, layout)
    k, v = rng.standard_normal((2, 3, 2, 64)).astype(np.float32)
    rows = prepare_rows(layout, k, v, c)
    assert rows.dtype == np.float16
    for token, head in np.ndindex(3, 2):
        x = (k[token, head][c.k_order[head]] - c.k_mean[head]) / c.k_ref[head]
        assert np.array_equal(rows[token, head, :64], x.astype(np.float16))
        assert np.array_equal(rows[token, head, 64:], hadamard(v[token, head], 64).astype(np.float16))


@pytest.mark.parametrize(
    "layout", [KVLayout("fp16", 1, 64, 64, 9), KVLayout("mkv2", 1, 64, 64, 99, window=9)]
)
def test_layers_without_blocks_ignore_the_calibration(layout):
    rng = fresh_rng()
    k, v = rng.standard_normal((2, 3, 1, 64)).astype(np.float32)
    want = np.concatenate([k, v], -1).astype(np.float16)
    assert np.array_equal(prepare_rows(layout, k, v, random_calibration(rng, layout)), want)


def test_infinities_do_not_become_nan():
    layout = KVLayout("mkv2", 1, 64, 64, 400)
    k = np.zeros((1, 1, 64), np.float32)
    k[0, 0, :3] = [np.inf, -np.inf, 3e38]
    rows = prepare_rows(layout, k, k, neutral_calibration(layout))
    assert np.isfinite(rows).all()
    assert rows[0, 0, :3].tolist() == [65504, -65504, 65504]


def test_flush_quantizes_the_ring_rows_of_the_block():
    rng = fresh_rng()
    layout = KVLayout("mkv2", 2, 64, 64, 400)
    state = KVState.empty(layout, 2)
    rows = rng.standard_normal((300, 2, 128)).astype(np.float16)
    ref = np.ones((2, 1), np.float32)
    flushed = []
    for token, row in enumerate(rows):
        state.append(1, token, row)
        if state.flush(1, token, ref):
            flushed.append(token + 1)
    assert flushed == [144, 208, 272]
    for i in range(3):
        want = quantize_block(layout, rows[16 + 64 * i : 80 + 64 * i].transpose(1, 0, 2), ref)
        assert np.array_equal(state.blocks[1, :, i].view(np.uint8), want)
    assert not state.blocks[0].any()
    assert np.array_equal(state.ring[1, :, :16], rows[:16].transpose(1, 0, 2))


def test_a_full_slot_is_refused():
    state = KVState.empty(KVLayout("fp16", 1, 64, 64, 10), 1)
    with pytest.raises(MoecError, match="context of 10"):
        state.append(0, 10, np.zeros((1, 128), np.float16))
