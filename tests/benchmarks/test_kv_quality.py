"""The cache benchmark on a tiny model: what it counts, and that moec's own run agrees with the simulation."""

from __future__ import annotations

from argparse import Namespace

import pytest
import torch

from benchmarks import kv_quality
from benchmarks.kv_quality import all_experts, changed_share, measure
from moec.checkpoint import open_checkpoint
from tests.helpers.tiny import tiny_checkpoint


@pytest.fixture
def folder(tmp_path, monkeypatch):
    monkeypatch.setattr(kv_quality, "BUILDS", tmp_path / "builds")
    return tiny_checkpoint(tmp_path / "model", max_position_embeddings=kv_quality.CONTEXT)


def rows(folder, *formats: str, bundle: bool = False) -> dict[str, dict]:
    options = Namespace(tokens=250, texts=1, formats=formats, threads=1, no_bundle=not bundle)
    return {row[""]: row for row in measure(folder, options)["rows"]}


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


def test_all_experts_are_chosen_and_scaled(folder):
    copy = open_checkpoint(all_experts(folder))
    assert copy.config.num_experts_per_tok == copy.config.num_experts == 8
    name = "model.layers.0.mlp.experts.down_proj"
    own, plain = (c.expert(name, 3).astype("float32") for c in (copy, open_checkpoint(folder)))
    assert (own == 4 * plain).all()


def test_changed_experts_are_counted_as_sets():
    chosen = torch.tensor([[[0, 1], [2, 3]]])
    assert changed_share(chosen, torch.tensor([[[1, 0], [3, 5]]])) == 0.25
