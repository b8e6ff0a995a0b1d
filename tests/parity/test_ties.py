"""What keeps random texts and tokens away from router ties sees the ties."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from moec.reference.routing import RouterConfig
from tests.helpers.captured import captured, checkpoint, rewritten
from tests.helpers.decided import draw
from tests.helpers.margins import sparse_mixer
from tests.helpers.rng import fresh_rng
from tests.helpers.ties import chosen, decided_rows, undecided


def _undecided(config: RouterConfig, *rows: list[float]) -> list[bool]:
    return undecided(chosen(config, np.zeros(len(rows[0]))), np.array(rows), 1e-4).tolist()


def test_two_logits_within_the_margin():
    near, far, inside = [1, 0.5, 0.50005, 0], [1, 0.5, 0.501, 0], [0.5, 0.50005, 0.2, 0]
    assert _undecided(RouterConfig(4, 2), near, far, inside) == [True, False, False]


def test_scores_that_are_equal_although_their_logits_are_not():
    config = RouterConfig(4, 2, scoring="sigmoid")
    assert _undecided(config, [30, 25, 20, 0], [3, 2, 1, 0]) == [True, False]


def test_groups_that_are_as_good():
    config = RouterConfig(4, 1, num_groups=2, topk_groups=1, group_score="top2", scoring="sigmoid")
    assert _undecided(config, [1, 0, 0, 1], [1, 0, 0, 0.99], [2, 0, 1, 0.5]) == [True, False, False]


def test_an_expert_at_the_edge_of_the_sparse_mixer():
    logits = np.array([[1, 0.98004, 0.5, 0], [1, 0.985, 0.5, 0], [1, 0.9, 0.5, 0]])
    pattern = lambda x, _: sparse_mixer(x, 0.01)  # noqa: E731
    assert undecided(pattern, logits, 1e-4).tolist() == [True, False, False]


@pytest.mark.parametrize("family", ["qwen2_moe", "deepseek_v3"])
def test_no_text_is_found_for_a_router_with_equal_rows(family):
    model, geometry = checkpoint(family).load_torch(), captured(family).geometry
    moe = geometry.moe[-1]
    rows = next(p for p in model.model.layers[moe.layer].mlp.gate.parameters() if p.ndim == 2)
    draw(fresh_rng(), model, geometry, rewritten(family), (5,))
    with torch.no_grad():
        rows[:] = rows[:1].clone()
    with pytest.raises(AssertionError, match="no text of 5 tokens"):
        draw(fresh_rng(), model, geometry, rewritten(family), (5,))


def test_no_token_is_found_for_a_router_with_equal_rows():
    rng = fresh_rng()
    router = dict(router_weight=np.ones((4, 8)), router_bias=np.zeros(4), selection_bias=np.zeros(4))
    with pytest.raises(AssertionError, match="near a tie for every token"):
        decided_rows(lambda n: rng.standard_normal((n, 8)), 3, dict(num_experts=4, top_k=2), router)
