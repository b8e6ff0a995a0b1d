"""The cache benchmark on a tiny model: what it counts, and that moec's own run agrees with the simulation."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from benchmarks import kv_quality
from benchmarks.kv_quality import all_experts, changed_share, measure
from moec.checkpoint import open_checkpoint
from tests.helpers.sample import sample_checkpoint
from tests.helpers.tiny import tiny_checkpoint


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_quality, "BUILDS", tmp_path / "builds")
    return tiny_checkpoint(tmp_path / "model", max_position_embeddings=kv_quality.CONTEXT)


def rows(folder, *formats: str, bundle: bool = False, tokens: int = 250, texts: int = 1) -> dict[str, dict]:
    options = Namespace(tokens=tokens, texts=texts, formats=formats, threads=1, no_bundle=not bundle)
    return {row[""]: row for row in measure(folder, options)["rows"]}


def percent(text: str) -> float:
    return float(text.removesuffix(" %"))


def test_rows_of_the_simulation(folder):
    found = rows(folder, "mkv2", "naive", "kivi")
    exact, mkv2, naive, kivi = found.values()
    assert (exact["KL"], exact["top-1"]) == (0, "100.0 %")
    assert (mkv2["bits"], mkv2["of fp16 at 8192"]) == (2.5, "17.1 %")
    assert (naive["bits"], kivi["bits"]) == (3.359, 3.0)
    assert all(row["KL"] > 0 and float(row["attention error"]) > 0 for row in (mkv2, naive, kivi))


@pytest.mark.slow
def test_moec_itself_agrees_with_the_simulation(folder):
    found = rows(folder, "fp16", "mkv2", bundle=True)
    for name in ("FP16", "MKV2"):
        own, simulated = found[f"{name} (moec)"], found[name]
        assert own["perplexity"] == pytest.approx(simulated["perplexity"], rel=1e-3)
        assert own["KL"] == pytest.approx(simulated["KL"], abs=2e-3)
        assert own["bits"] == simulated["bits"]


@pytest.mark.slow
def test_bars_on_the_sample(tmp_path, monkeypatch):
    """What 2.5 bits may cost; the benchmark's own run is longer (texts of 4096 tokens)."""
    monkeypatch.setattr(kv_quality, "BUILDS", tmp_path / "builds")
    exact, mkv2 = rows(sample_checkpoint(), "mkv2", tokens=2048, texts=3).values()
    assert mkv2["bits"] <= 2.5
    assert percent(mkv2["of fp16 at 8192"]) < 18
    assert mkv2["perplexity"] <= 1.015 * exact["perplexity"]
    assert mkv2["KL"] <= 0.06
    assert percent(mkv2["top-1"]) >= 84


@pytest.mark.slow
def test_bars_on_the_sample_with_all_experts(tmp_path, monkeypatch):
    """Without a router, whose near ties make most of the difference, the cache is alone."""
    monkeypatch.setattr(kv_quality, "BUILDS", tmp_path / "builds")
    found = rows(all_experts(sample_checkpoint()), "mkv2", "naive", "kivi", tokens=2048, texts=3)
    exact, mkv2, naive, kivi = found.values()
    assert mkv2["perplexity"] <= 1.015 * exact["perplexity"]
    assert mkv2["KL"] <= 0.03
    assert percent(mkv2["top-1"]) >= 92
    assert 5 * mkv2["KL"] <= min(naive["KL"], kivi["KL"])


def test_all_experts_are_chosen_and_scaled(folder):
    copy = open_checkpoint(all_experts(folder))
    assert copy.config.num_experts_per_tok == copy.config.num_experts == 8
    name = "model.layers.0.mlp.experts.down_proj"
    own, plain = (c.expert(name, 3).astype("float32") for c in (copy, open_checkpoint(folder)))
    assert (own == 4 * plain).all()


def test_changed_experts_are_counted_as_sets():
    chosen = torch.tensor([[[0, 1], [2, 3]]])
    assert changed_share(chosen, torch.tensor([[[1, 0], [3, 5]]])) == 0.25
