"""How far back a slot can be set exactly, so that a conversation that diverges late keeps its cache."""

from __future__ import annotations

from collections.abc import Iterable

from moec.reference.kv_layout import KVLayout


def can_roll_back(layouts: Iterable[KVLayout], length: int, target: int) -> bool:
    """Whether every layer's cache, holding `length` tokens, is exact again if its length is set to `target`.

    A cache is a function of its length and of the rows still in its ring: going back is exact as long as no
    row that the target needs was overwritten since.
    """
    return target <= length and all(_keeps_rows(layout, length, target) for layout in layouts)


def _keeps_rows(layout: KVLayout, length: int, target: int) -> bool:
    if target == length or target <= layout.ring_sinks:
        return True
    oldest_kept = length - layout.ring_period  # tokens below were overwritten (sinks never are)
    return _first_needed(layout, target) >= oldest_kept


def _first_needed(layout: KVLayout, target: int) -> int:
    """The oldest token after the sinks that the next query at `target` or the next flush reads of it."""
    if layout.window:
        return max(0, target - layout.window + 1)
    if layout.quantized:
        return layout.sink_tokens + layout.block_tokens * layout.quantized_blocks(target)
    return 0


def common_prefix(a: list[int], b: list[int]) -> int:
    """Length of the longest common beginning."""
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
