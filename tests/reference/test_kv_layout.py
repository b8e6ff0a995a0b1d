from __future__ import annotations

import numpy as np
import pytest

from moec.errors import MoecError
from moec.reference.kv_cache import KVLayout, promoted_channels, value_group

PROMOTED = {  # head_dim: (mkv2, lean), from the interface of the format
    16: (4, 4), 32: (8, 4), 48: (16, 8), 64: (16, 8), 80: (16, 12), 96: (32, 16), 128: (32, 16),
    192: (48, 32), 256: (64, 32),
}  # fmt: skip


@pytest.mark.parametrize("k_dim", PROMOTED)
def test_promoted_channels(k_dim):
    assert (promoted_channels("mkv2", k_dim), promoted_channels("mkv2_lean", k_dim)) == PROMOTED[k_dim]
    assert promoted_channels("k4v2", k_dim) == k_dim
    assert promoted_channels("fp16", k_dim) == 0


def test_value_groups():
    groups = {64: 64, 80: 16, 96: 32, 128: 64, 192: 64, 48: 16, 256: 64, 32: 32}
    assert {dim: value_group(dim) for dim in groups} == groups


def test_byte_table_of_head_dim_64():
    layout = KVLayout("mkv2", 3, 64, 64, 4096)
    assert list(layout.offsets.values()) == [0, 1024, 1280, 1344, 1408, 2432, 2496]
    assert layout.block_bytes == 2560
    assert layout.bits_per_element == 2.5
    assert KVLayout("mkv2_lean", 3, 64, 64, 4096).bits_per_element == 2.375
    assert KVLayout("k4v2", 3, 64, 64, 4096).bits_per_element == 3.25
    int8 = KVLayout("int8", 3, 64, 64, 4096)
    assert int8.offsets == {"k_codes": 0, "k_scale": 4096, "v_codes": 4160, "v_scale": 8256}
    assert (int8.block_bytes, int8.bits_per_element) == (8320, 8.125)


@pytest.mark.parametrize(("context", "bits"), [(2048, 3.47), (4096, 2.98), (16384, 2.62), (131072, 2.52)])
def test_bits_of_the_whole_allocation(context, bits):
    assert KVLayout("mkv2", 3, 64, 64, context).bits_per_element_allocated == pytest.approx(bits, abs=0.005)


@pytest.mark.parametrize("format", ["mkv2", "mkv2_lean", "k4v2", "int8"])
@pytest.mark.parametrize("dims", [(16, 16), (80, 80), (96, 96), (192, 128), (36, 20), (256, 256)])
def test_sections_are_aligned_and_do_not_overlap(format, dims):
    layout = KVLayout(format, 2, *dims, 1000)
    end = 0
    for section in layout.sections.values():
        assert section.offset % 16 == 0
        assert end <= section.offset < end + 16
        end = section.end
    assert layout.block_bytes % 128 == 0
    assert end <= layout.block_bytes < end + 128


def test_quantized_blocks_by_counting():
    layout = KVLayout("mkv2", 1, 64, 64, 1000)
    assert [layout.quantized_blocks(n) for n in (0, 79, 80, 143, 144, 207, 208, 1000)] == [
        0,
        0,
        0,
        0,
        1,
        1,
        2,
        14,
    ]
    assert layout.num_blocks == 14
    assert KVLayout("mkv2", 1, 64, 64, 100).num_blocks == 1


@pytest.mark.parametrize("rollback", [0, 7])
def test_ring_holds_all_tokens_that_are_not_in_blocks(rollback):
    layout = KVLayout("mkv2", 1, 64, 64, 1000, rollback_tokens=rollback)
    for length in range(1, 400):
        oldest = layout.sink_tokens + 64 * layout.quantized_blocks(max(0, length - 1 - rollback))
        live = np.unique(np.concatenate([np.arange(min(16, length)), np.arange(oldest, length)]))
        rows = layout.ring_row(live)
        assert len(set(rows.tolist())) == len(live)
        assert rows.size == 0 or rows.max() < layout.ring_rows
        assert [layout.ring_row(int(token)) for token in live] == rows.tolist()


def test_windows_and_float_formats_have_a_ring_only():
    window = KVLayout("mkv2", 2, 64, 32, 1000, window=100, rollback_tokens=4)
    assert (window.ring_rows, window.ring_dtype, window.quantized) == (104, np.float16, False)
    assert window.blocks_shape(4) == (1, 1, 1, 1)
    assert KVLayout("fp32", 2, 64, 32, 1000, window=100).ring_dtype == np.float32
    assert KVLayout("fp16", 2, 64, 32, 50, window=100).ring_rows == 50
    full = KVLayout("fp32", 2, 64, 32, 1000)
    assert full.ring_shape(4) == (4, 2, 1000, 96)
    assert full.bytes_allocated(4) == 4 * 2 * 1000 * 96 * 4 + 1
    assert full.ring_row(999) == 999


@pytest.mark.parametrize(
    "wrong",
    [
        {"format": "int3"},
        {"k_dim": 66},
        {"block_tokens": 32},
        {"promoted": 6},
        {"format": "int8", "promoted": 16},
        {"context": 0},
        {"window": -1},
    ],
)
def test_impossible_layouts_are_refused(wrong):
    good = {"format": "mkv2", "num_kv_heads": 1, "k_dim": 64, "v_dim": 64, "context": 100}
    with pytest.raises(MoecError):
        KVLayout(**(good | wrong))
