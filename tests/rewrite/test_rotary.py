"""Which rotary embeddings are joined."""

from __future__ import annotations

import pytest

from moec.rewrite import run
from tests.helpers.captured import captured
from tests.rewrite.test_pipeline import context


@pytest.mark.parametrize(("family", "pairs", "left"), [("qwen2_moe", 2, 0), ("deepseek_v3", 0, 0)])
def test_whole_heads_are_joined_and_partial_ones_stay(family, pairs, left):
    model = captured(family).model.clone()
    run(model, context(family))
    kinds = [n.op_type for n in model.graph]
    assert kinds.count("RotaryPair") == pairs
    assert kinds.count("RotaryEmbedding") == left
