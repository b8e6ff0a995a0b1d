"""No transposes remain between the projections and the attention operator."""

from __future__ import annotations

import pytest

from moec.rewrite import MOEC_PASSES, run
from tests.helpers.captured import captured
from tests.rewrite.test_pipeline import context


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss"])
def test_transposes_of_activations(family):
    model = captured(family).model.clone()
    run(model, context(family), passes=MOEC_PASSES)
    left = [n for n in model.graph if n.op_type == "Transpose" and not n.inputs[0].is_initializer()]
    # GPT-OSS rotates without the standard operator: q and k of both layers keep one exchange each way.
    assert len(left) == {"qwen2_moe": 0, "gpt_oss": 8}[family]
