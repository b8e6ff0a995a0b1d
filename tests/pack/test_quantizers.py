"""Packing takes the native quantizers only where they give the reference's bytes, and works without them."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from moec import native
from moec.pack import quantizers
from moec.pack.quantizers import quantizer
from moec.reference.weights import QUANTIZERS


@pytest.fixture(autouse=True)
def _forget_choice():
    quantizer.cache_clear()
    yield
    quantizer.cache_clear()


@pytest.mark.parametrize("transform", ["int4", "int8"])
def test_the_chosen_quantizer_gives_the_reference_bytes(transform):
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    rng = np.random.default_rng(seed)
    chosen = quantizer(transform)
    if native.find_library("moec_cpu"):
        assert chosen is not QUANTIZERS[transform]
    for rows, columns in ((1, 1), (3, 63), (5, 64), (7, 65), (64, 576)):
        weight = rng.normal(size=(rows, columns)) * np.exp2(rng.integers(-30, 16, (rows, 1)).astype(float))
        weight = weight.astype(ml_dtypes.bfloat16)
        for counts in (None, np.exp2(rng.normal(size=columns) * 4).astype(np.float32)):
            for a, b in zip(chosen(weight, counts), QUANTIZERS[transform](weight, counts), strict=True):
                assert a.dtype == b.dtype
                assert a.tobytes() == b.tobytes(), (rows, columns, counts is None)


def wrong(weight, importance=None):
    codes, scales = QUANTIZERS["int4"](weight, importance)
    return codes ^ 1, scales


def missing(weight, importance=None):
    raise AttributeError("moec_quantize_int4")


@pytest.mark.parametrize("broken", [wrong, missing])
def test_a_deviating_or_older_library_is_not_used(monkeypatch, broken):
    monkeypatch.setattr(native, "find_library", lambda _: "there")
    monkeypatch.setitem(quantizers._NATIVE, "int4", broken)
    assert quantizer("int4") is QUANTIZERS["int4"]


def test_packing_works_without_the_library(monkeypatch):
    monkeypatch.setattr(native, "find_library", lambda _: None)
    assert quantizer("int8") is QUANTIZERS["int8"]
