"""From statistics to the static tensors of a layer's cache: which channels are promoted, and references.

References. A block stores its scales as E4M3, which is exact to 1/16 between 2^-6 and 448 only. The
reference of a channel (of a V group) is the power of two nearest to its typical scale, so stored scales are
near 1: 2^6 below and 448 above stay precise. Where one block of the calibration text had a scale more than
112 times the reference, the reference is raised until it fits, so that a fourfold larger one still does.
The amplitudes of int8 blocks are stored relative to 1/16 of the largest one seen.
"""

from __future__ import annotations

import numpy as np

from moec.calibrate.statistics import LayerStatistics
from moec.reference.kv_block import CLIP_2BIT, LEVELS_2BIT, key_levels
from moec.reference.kv_cache import Calibration, neutral_calibration
from moec.reference.kv_layout import KVLayout

_HEADROOM = 448 / 4
_LARGEST_AMPLITUDE = 16.0
_MIN_EXPONENT, _MAX_EXPONENT = -24, 24


def fit_layer(
    statistics: LayerStatistics, *, layout: KVLayout | None = None, centre: bool = True
) -> Calibration:
    """The calibration of one layer.

    Args:
        statistics: Of a layer with blocks; nothing seen gives the neutral calibration.
        layout: The layout to fit for, of the same dimensions; None = the one of the statistics.
        centre: False keeps `k_mean` zero: under a logit soft cap the mean does not cancel in the softmax.
    """
    layout = layout or statistics.layout
    if not statistics.blocks or not layout.quantized:
        return neutral_calibration(layout)
    order = channel_order(layout, statistics.q_square * statistics.k_range_square)
    mean = statistics.k_sum / statistics.tokens * centre
    if layout.format == "int8":
        references = _amplitude_references(statistics, mean, order)
    else:
        references = _key_reference(layout, statistics, order), _value_reference(statistics)
    permuted = np.take_along_axis(mean, order, axis=-1).astype(np.float32)
    return Calibration(permuted, references[0], order.astype(np.int32), references[1])


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


def _key_reference(layout: KVLayout, statistics: LayerStatistics, order: np.ndarray) -> np.ndarray:
    levels = key_levels(layout).astype(np.float64)
    step = np.where(levels == LEVELS_2BIT, float(CLIP_2BIT), 1.0) / levels
    typical = np.sqrt(statistics.k_range_square / statistics.blocks)
    permuted = [np.take_along_axis(x, order, axis=-1) for x in (typical, statistics.k_range_max)]
    return power_of_two(*(x * step for x in permuted))


def _value_reference(statistics: LayerStatistics) -> np.ndarray:
    step = float(CLIP_2BIT) / float(LEVELS_2BIT)
    typical = np.sqrt(statistics.v_range_square / statistics.tokens)
    return power_of_two(typical * step, statistics.v_range_max * step)


def _amplitude_references(
    statistics: LayerStatistics, mean: np.ndarray, order: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    amplitude = np.maximum(statistics.k_high - mean, mean - statistics.k_low)
    keys = np.take_along_axis(amplitude, order, axis=-1)
    return tuple(power_of_two(x / _LARGEST_AMPLITUDE, 0 * x) for x in (keys, statistics.v_high))


def power_of_two(typical: np.ndarray, largest: np.ndarray) -> np.ndarray:
    """float32 powers of two: nearest (in the logarithm) to `typical`, and at least `largest` / 112.

    Channels that never moved (typical 0) get 1.
    """
    with np.errstate(divide="ignore"):
        near = np.rint(np.log2(typical))
        least = np.ceil(np.log2(largest / _HEADROOM))
    exponent = np.clip(np.maximum(near, least), _MIN_EXPONENT, _MAX_EXPONENT)
    return np.where(typical > 0, np.exp2(exponent), 1.0).astype(np.float32)
