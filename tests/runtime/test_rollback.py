"""When a slot can go back exactly, against the NumPy truth of which rows are overwritten."""

import numpy as np
import pytest

from moec.reference.kv_layout import KVLayout
from moec.runtime.rollback import can_roll_back, common_prefix

LAYOUTS = [
    KVLayout("mkv2", 1, 16, 16, 500, rollback_tokens=0),
    KVLayout("mkv2", 1, 16, 16, 500, rollback_tokens=7),
    KVLayout("mkv2", 1, 16, 16, 500, sink_tokens=4, recent_tokens=20),
    KVLayout("fp32", 1, 16, 16, 500),
    KVLayout("mkv2", 1, 16, 16, 500, window=32, rollback_tokens=5),
    KVLayout("fp16", 1, 16, 16, 20, window=32),
]


def needed(layout, length):
    """Tokens that the query of the next token reads from the ring; a flush reads a part of them."""
    if layout.window:
        return range(max(0, length - layout.window + 1), length)
    start = layout.ring_sinks + 64 * layout.quantized_blocks(length)
    return [t for t in range(length) if t < layout.ring_sinks or t >= start]


def exact(layout, length, target):
    """Brute force: write `length` tokens into the ring, then look whether each needed one is still there."""
    ring = np.full(layout.ring_rows, -1)
    for token in range(length):
        ring[layout.ring_row(token)] = token
    return all(ring[layout.ring_row(token)] == token for token in needed(layout, target))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_against_brute_force(layout, rng):
    found = set()
    for _ in range(400):
        length = int(rng.integers(0, layout.context + 1))
        target = int(rng.integers(max(0, length - 150), length + 1))
        answer = can_roll_back([layout], length, target)
        found.add(answer)
        if answer:
            assert exact(layout, length, target), (length, target)
        elif layout.ring_rows < length:  # never needlessly refused
            assert not exact(layout, length, target), (length, target)
    assert True in found


@pytest.mark.parametrize("layout", LAYOUTS)
def test_promised_rollback_is_always_possible(layout):
    for length in range(layout.context):
        target = max(0, length - layout.rollback_tokens)
        assert can_roll_back([layout], length, target)


def test_every_layer_must_agree():
    assert can_roll_back([LAYOUTS[3]], 400, 100)
    assert not can_roll_back([LAYOUTS[3], LAYOUTS[0]], 400, 100)
    assert not can_roll_back([], 5, 6)


def test_common_prefix(rng):
    a = list(rng.integers(0, 9, 30))
    assert common_prefix(a, a[:20]) == 20
    assert common_prefix([], a) == 0
    assert common_prefix(a, [*a[:7], a[7] + 1, *a[8:]]) == 7
