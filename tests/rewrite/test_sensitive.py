"""Which layers keep 8 bits, in families whose projections are laid out differently."""

from __future__ import annotations

import pytest

from moec.rewrite import run
from moec.rewrite.pipeline import MOEC_PASSES
from moec.rewrite.sensitive import sensitive_weights
from tests.helpers.captured import captured
from tests.rewrite.test_pipeline import context

READERS = ("q_proj.weight", "gate_proj.weight", "up_proj.weight")
ALWAYS = ("o_proj.weight", "k_proj.weight", "v_proj.weight", "down_proj.weight", "kv_b_proj.weight")


@pytest.mark.parametrize("family", ["qwen2_moe", "mixtral", "deepseek_v3"])
def test_keys_values_and_residual_writers_are_sensitive(family):
    model = captured(family).model.clone()
    run(model, context(family), passes=MOEC_PASSES)
    names = sensitive_weights(model.graph)
    dense = [n.inputs[1].producer() for n in model.graph if n.op_type == "MatMul"]
    weights = {t.inputs[0].name for t in dense if t is not None and t.op_type == "Transpose"}
    for layer in sorted(w for w in weights if w.endswith(ALWAYS)):
        assert layer in names
    for layer in sorted(w for w in weights if w.endswith(READERS)):
        assert layer not in names
    assert names <= weights
