"""Layers are raised until the measured divergence is within the budget, and the worst ones first."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moec.calibrate import budget, calibrate
from moec.calibrate.budget import CachedModel, choose
from moec.calibrate.run import fit_layers, observe
from moec.checkpoint import open_checkpoint
from moec.frontend.probe import probe
from moec.reference.kv_layout import KVLayout
from tests.helpers.decided import draw
from tests.helpers.rng import fresh_rng
from tests.helpers.tiny import shakespeare, tiny_checkpoint


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return open_checkpoint(tiny_checkpoint(tmp_path_factory.mktemp("budget") / "model", seed=7))


@pytest.fixture(scope="module")
def geometry(checkpoint):
    return probe(checkpoint, 512)


@pytest.fixture(scope="module")
def text_file(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(shakespeare(6000), encoding="utf-8")
    return path


def layouts(format: str = "mkv2") -> dict[int, KVLayout]:
    return {i: KVLayout(format, 2, 64, 64, 512) for i in range(2)}


def test_a_loose_budget_changes_nothing(checkpoint, geometry, text_file):
    choice = choose(checkpoint, geometry, layouts(), 1e3, [text_file])
    assert choice.layouts == layouts()
    assert not choice.raised
    assert choice.rounds == [(0, choice.divergence)]
    plain = calibrate(checkpoint, geometry, layouts(), [text_file])
    assert all(np.array_equal(choice.tensors[name], value) for name, value in plain.items())
    assert set(choice.errors[0]) == {"mkv2", "k4v2", "int8"}
    assert choice.errors[0]["int8"] < choice.errors[0]["k4v2"] < choice.errors[0]["mkv2"] < 0.5


def test_a_tight_budget_raises_layers_until_it_holds(checkpoint, geometry, text_file):
    loose = choose(checkpoint, geometry, layouts(), 1e3, [text_file])
    choice = choose(checkpoint, geometry, layouts(), loose.divergence / 4, [text_file])
    assert choice.divergence <= loose.divergence / 4
    assert choice.raised == {i: x.format for i, x in choice.layouts.items() if x.format != "mkv2"}
    assert choice.raised
    assert [count for count, _ in choice.rounds] == sorted(count for count, _ in choice.rounds)
    for layer, layout in choice.layouts.items():
        assert layout == KVLayout(layout.format, 2, 64, 64, 512)
        assert choice.tensors[f"kv.{layer}.k_order"].shape == (2, 64)


def test_a_budget_of_nothing_ends_in_fp16(checkpoint, geometry, text_file):
    choice = choose(checkpoint, geometry, layouts(), 0.0, [text_file])
    assert set(choice.raised.values()) == {"fp16"}
    assert choice.divergence < 1e-6


def test_broken_layers_are_raised_under_any_budget(checkpoint, geometry, text_file, monkeypatch):
    monkeypatch.setattr(budget, "LAYER_LIMIT", 0.02)
    choice = choose(checkpoint, geometry, layouts(), 1e3, [text_file])
    assert choice.raised == {0: "int8", 1: "int8"}


@torch.inference_mode()
def test_divergence_is_that_of_the_models(checkpoint, geometry):
    ids = draw(fresh_rng(), checkpoint.load_torch(), geometry, (), (400,))[0][None].astype(np.int64)
    model = CachedModel(checkpoint, geometry, None)
    plain, cached = layouts("fp16"), layouts("mkv2")
    calibrations = fit_layers(geometry, cached, observe(checkpoint, cached, ids))
    reference, errors = model.reference(ids, [(plain, fit_layers(geometry, plain, {}))])
    assert not errors
    want = torch.log_softmax(checkpoint.load_torch()(torch.from_numpy(ids)).logits[:, 200:], -1)
    torch.testing.assert_close(reference, want, rtol=1e-4, atol=1e-4)
    assert model.divergence(ids, reference, plain, fit_layers(geometry, plain, {})) == pytest.approx(
        0, abs=1e-6
    )
    assert model.divergence(ids, reference, cached, calibrations) > 1e-5
