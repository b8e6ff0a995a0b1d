"""The native quantizers give the reference's bytes; without them packing still works."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from moec.errors import MoecError
from moec.pack import quantizers
from moec.pack.quantizers import native_quantizer, quantizer
from moec.reference.weights import QUANTIZERS


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return np.random.default_rng(seed)


def native_or_skip(transform):
    return native_quantizer(transform) or pytest.skip("libmoec_cpu is not built")


@pytest.mark.parametrize("transform", ["int4", "int8"])
def test_native_bytes_are_the_reference_bytes(rng, transform):
    native = native_or_skip(transform)
    for rows, columns in ((1, 1), (3, 63), (5, 64), (7, 65), (64, 576), (9, 200)):
        weight = rng.normal(size=(rows, columns)) * np.exp2(rng.integers(-30, 16, (rows, 1)).astype(float))
        weight[rng.random((rows, columns)) < 0.2] = 0
        for kind in (np.float32, ml_dtypes.bfloat16):
            for a, b in zip(
                native(weight.astype(kind)), QUANTIZERS[transform](weight.astype(kind)), strict=True
            ):
                assert a.dtype == b.dtype
                assert a.tobytes() == b.tobytes(), (rows, columns, kind)


@pytest.mark.parametrize("transform", ["int4", "int8"])
def test_native_refuses_what_the_reference_refuses(transform):
    native = native_or_skip(transform)
    with pytest.raises(MoecError, match="finite"):
        native(np.full((2, 3), np.inf, np.float32))
    with pytest.raises(MoecError, match="2-D"):
        native(np.zeros(3, np.float32))


def test_a_deviating_library_is_not_used(monkeypatch):
    def wrong(weight):
        codes, scales = QUANTIZERS["int4"](weight)
        return codes ^ 1, scales

    quantizer.cache_clear()
    monkeypatch.setattr(quantizers, "native_quantizer", lambda _: wrong)
    assert quantizer("int4") is QUANTIZERS["int4"]
    monkeypatch.setattr(quantizers, "native_quantizer", lambda _: None)
    quantizer.cache_clear()
    assert quantizer("int4") is QUANTIZERS["int4"]
    quantizer.cache_clear()
