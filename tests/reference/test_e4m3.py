from __future__ import annotations

import ml_dtypes
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from moec.reference.e4m3 import E4M3_POSITIVE, E4M3_VALUES, e4m3_decode, e4m3_rne, e4m3_up
from tests.helpers.rng import fresh_rng

THEIRS = np.arange(256, dtype=np.uint8).view(ml_dtypes.float8_e4m3fn).astype(np.float32)
float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)


def test_the_table_is_that_of_ml_dtypes():
    assert np.array_equal(E4M3_VALUES, THEIRS, equal_nan=True)
    assert E4M3_POSITIVE[0] == 2.0**-9
    assert E4M3_POSITIVE[-1] == 448


def test_rounding_to_nearest_equals_ml_dtypes_on_ties_and_random_numbers():
    rng = fresh_rng()
    values = THEIRS[np.isfinite(THEIRS)]
    ordered = np.unique(values)
    x = np.concatenate(
        [
            values,
            (ordered[:-1] + ordered[1:]) / 2,
            np.nextafter((ordered[:-1] + ordered[1:]) / 2, np.float32(9e9)),
            rng.standard_normal(20000) * 10.0 ** rng.integers(-5, 3, 20000),
        ]
    ).astype(np.float32)
    x = np.clip(x, -448, 448)
    theirs = x.astype(ml_dtypes.float8_e4m3fn).view(np.uint8)
    assert np.array_equal(e4m3_rne(x), np.where(theirs == 0x80, 0, theirs))


def test_zero_has_one_code():
    x = np.array([0.0, -0.0, -(2.0**-11), -(2.0**-10), 1e-40, -1e-40], np.float32)
    assert np.array_equal(e4m3_rne(x), np.zeros(6, np.uint8))


@settings(deadline=None)
@given(float32s)
def test_rounding_saturates_and_is_the_nearest(x):
    value = float(e4m3_decode(e4m3_rne(np.float32(x))))
    clamped = min(max(x, -448.0), 448.0)
    assert abs(value - clamped) <= np.abs(THEIRS[np.isfinite(THEIRS)].astype(np.float64) - clamped).min()


@settings(deadline=None)
@given(float32s)
def test_rounding_up_gives_the_smallest_positive_value_not_below(x):
    value = float(e4m3_decode(e4m3_up(np.float32(x))))
    above = [v for v in E4M3_POSITIVE if v >= x]
    assert value == (above[0] if above else 448.0)
