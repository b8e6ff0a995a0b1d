"""Numbers of the last line."""

import numpy as np
import pytest

from moec.runtime.statistics import Statistics


def test_speed_and_percentiles(rng):
    seconds = list(rng.uniform(0.01, 0.2, 99))
    stats = Statistics(12, 4, 100, 0.5, seconds, 2_000_000, 10_000_000)
    assert stats.tokens_per_second == pytest.approx(99 / sum(seconds))
    assert stats.milliseconds(50) == pytest.approx(1e3 * sorted(seconds)[49])
    assert stats.milliseconds(95) == pytest.approx(1e3 * np.quantile(seconds, 0.95))


def test_text():
    stats = Statistics(12, 4, 3, 0.5, [0.1, 0.1], 2_000_000, 10_000_000)
    assert str(stats) == (
        "prompt 12 tokens (4 cached) in 0.50 s | generated 3 tokens, 10.0 tokens/s, 100.0 ms/token p50, "
        "100.0 p95 | KV cache 2.0 MB, fp16 would take 10.0 MB (5.0x)"
    )


def test_nothing_generated():
    assert "0.0 tokens/s" in str(Statistics())
