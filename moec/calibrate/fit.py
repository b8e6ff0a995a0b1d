"""From statistics to the static tensors of a layer's cache: which channels are promoted, and references.

References. A block stores its scales as E4M3, which is exact to 1/16 between 2^-6 and 448 only. The
reference of a channel (of a V group) is the power of two nearest to its typical scale, so stored scales are
near 1: 2^6 below and 448 above stay precise. Where one block of the calibration text had a scale more than
112 times the reference, the reference is raised until it fits, so that a fourfold larger one still does.
"""

from __future__ import annotations

import numpy as np

from moec.calibrate.statistics import LayerStatistics
from moec.reference.kv_block import CLIP_2BIT, LEVELS_2BIT, key_levels
from moec.reference.kv_cache import Calibration, neutral_calibration
from moec.reference.kv_layout import KVLayout

_HEADROOM = 448 / 4
_MIN_EXPONENT, _MAX_EXPONENT = -24, 24


def fit_layer(statistics: LayerStatistics, *, centre: bool = True) -> Calibration:
    """The calibration of one layer.

    Args:
        statistics: Of a layer with blocks; nothing seen gives the neutral calibration.
        centre: False keeps `k_mean` zero: under a logit soft cap the mean does not cancel in the softmax.
    """
    layout = statistics.layout
    if not statistics.blocks:
        return neutral_calibration(layout)
    order = channel_order(layout, statistics.q_square * statistics.k_range_square)
    mean = np.take_along_axis(statistics.k_sum / statistics.tokens, order, axis=-1)
    return Calibration(
        k_mean=mean.astype(np.float32) if centre else np.zeros(mean.shape, np.float32),
        k_ref=_key_reference(statistics, order),
        k_order=order.astype(np.int32),
        v_ref=_value_reference(statistics),
    )


def channel_order(layout: KVLayout, score: np.ndarray) -> np.ndarray:
    """Promoted channels first, each part in ascending channel order.

    Args:
        layout: Gives the number of promoted channels P.
        score: `[Hkv, Dk]`, E[q^2] * E[range^2]: the logit error a channel would cause. The P largest are
            promoted; of equal ones, the lower channel.

    Returns:
        int64 `[Hkv, Dk]`: permuted channel c is channel order[c].
    """
    ranked = np.argsort(-score, axis=-1, kind="stable")
    promoted, rest = ranked[:, : layout.promoted], ranked[:, layout.promoted :]
    return np.concatenate([np.sort(promoted, axis=-1), np.sort(rest, axis=-1)], axis=-1)


def _key_reference(statistics: LayerStatistics, order: np.ndarray) -> np.ndarray:
    levels = key_levels(statistics.layout).astype(np.float64)
    step = np.where(levels == LEVELS_2BIT, float(CLIP_2BIT), 1.0) / levels
    typical = np.sqrt(statistics.k_range_square / statistics.blocks)
    permuted = [np.take_along_axis(x, order, axis=-1) for x in (typical, statistics.k_range_max)]
    return power_of_two(*(x * step for x in permuted))


def _value_reference(statistics: LayerStatistics) -> np.ndarray:
    step = float(CLIP_2BIT) / float(LEVELS_2BIT)
    typical = np.sqrt(statistics.v_range_square / statistics.tokens)
    return power_of_two(typical * step, statistics.v_range_max * step)


def power_of_two(typical: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """float32 powers of two: nearest (in the logarithm) to `typical`, and at least `largest` / 112.

    Channels that never moved (typical 0) get 1.
    """
    with np.errstate(divide="ignore"):
        near = np.rint(np.log2(typical))
        least = np.ceil(np.log2(largest / _HEADROOM))
    exponent = np.clip(np.maximum(near, least), _MIN_EXPONENT, _MAX_EXPONENT)
    return np.where(typical > 0, np.exp2(exponent), 1.0).astype(np.float32)
