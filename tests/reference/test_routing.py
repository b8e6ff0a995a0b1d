from __future__ import annotations

import numpy as np
import pytest
import torch

from moec.errors import MoecError
from moec.reference.routing import RouterConfig, route, router_logits, top_k
from tests.helpers.rng import fresh_rng

NONE = np.zeros(8, np.float32)


def test_ties_go_to_the_lower_expert():
    assert top_k(np.array([[1.0, 3.0, 3.0, 2.0, 3.0]]), 3).tolist() == [[1, 2, 4]]
    ids, weights = route(RouterConfig(8, 3, renormalize=True), np.zeros((1, 8), np.float32), NONE)
    assert ids.tolist() == [[0, 1, 2]]
    assert np.allclose(weights, 1 / 3)


@pytest.mark.parametrize("renormalize", [False, True])
def test_softmax_router_equals_torch(renormalize):
    logits = fresh_rng().standard_normal((20, 8)).astype(np.float32)
    values, indices = torch.from_numpy(logits).softmax(-1).topk(3)
    values = values / values.sum(-1, keepdim=True) if renormalize else values
    ids, weights = route(RouterConfig(8, 3, renormalize=renormalize, routed_scale=1.5), logits, NONE)
    assert np.array_equal(ids, indices.numpy())
    assert np.allclose(weights, 1.5 * values.numpy(), rtol=1e-5)


def test_selection_bias_changes_the_choice_not_the_weights():
    logits = np.array([[2.0, 1.0, 0.0, -1.0, -2.0, -3.0, -4.0, -5.0]], np.float32)
    bias = NONE.copy()
    bias[7] = 10
    ids, weights = route(RouterConfig(8, 2, scoring="sigmoid"), logits, bias)
    assert ids.tolist() == [[7, 0]]
    assert np.allclose(weights, 1 / (1 + np.exp([[5.0, -2.0]])), rtol=1e-6)


def test_softmax_after_topk():
    logits = np.array([[0.0, 3.0, 1.0, 2.0, -1.0, -1.0, -1.0, -1.0]], np.float32)
    ids, weights = route(RouterConfig(8, 2, scoring="softmax_after_topk"), logits, NONE)
    assert ids.tolist() == [[1, 3]]
    assert np.allclose(weights, [[1 / (1 + np.exp(-1)), 1 / (1 + np.exp(1))]])


@pytest.mark.parametrize(("score", "want"), [("max", [0, 1]), ("top2", [4, 5])])
def test_groups_limit_the_choice(score, want):
    # group 0 has the best expert, group 2 the best pair
    logits = np.array([[9.0, 0.0, -5.0, -5.0, 5.0, 4.9, -5.0, -5.0]], np.float32)
    config = RouterConfig(8, 2, "softmax_after_topk", num_groups=4, topk_groups=1, group_score=score)
    assert route(config, logits, NONE)[0].tolist() == [want]


def test_groups_of_one_expert():
    config = RouterConfig(4, 2, num_groups=4, topk_groups=2, group_score="top2")
    assert route(config, np.array([[1.0, 2.0, 3.0, 0.0]], np.float32), NONE[:4])[0].tolist() == [[2, 1]]


def test_logits():
    rng = fresh_rng()
    x, w, b = rng.standard_normal((5, 16)), rng.standard_normal((8, 16)), rng.standard_normal(8)
    assert np.allclose(router_logits(x, w, b), x @ w.T + b, rtol=1e-5)


@pytest.mark.parametrize(
    "wrong", [{"top_k": 9}, {"scoring": "relu"}, {"num_groups": 3}, {"group_score": "sum"}]
)
def test_contradictions_are_refused(wrong):
    with pytest.raises(MoecError):
        RouterConfig(**({"num_experts": 8, "top_k": 2} | wrong))
