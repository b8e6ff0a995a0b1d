"""Soft caps on attention's logits. No MoE family of transformers has them, so two get Gemma 2's attention."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from transformers import AttentionInterface
from transformers.models.gemma2.modeling_gemma2 import eager_attention_forward as capped
from transformers.models.mixtral import modeling_mixtral
from transformers.models.qwen2_moe import modeling_qwen2_moe

from moec import native
from moec.frontend import capture, hooks
from tests.helpers.built import build_graph
from tests.helpers.captured import BATCH, CONTEXT, checkpoint
from tests.helpers.decided import LENGTHS, SUMS, draw
from tests.helpers.graphs import Stepper, reference_logits, session, two_slots
from tests.helpers.rng import fresh_rng

CAP = 0.3  # the logits of these models are small
CODE = {"qwen2_moe": modeling_qwen2_moe, "mixtral": modeling_mixtral}  # mixtral: a window of 8 tokens

pytestmark = pytest.mark.skipif(native.find_library("moec_cpu") is None, reason="libmoec_cpu.so is not built")


@pytest.mark.parametrize(
    ("family", "dtype"),
    [
        ("qwen2_moe", torch.float32),
        pytest.param("mixtral", torch.float32, marks=pytest.mark.slow),
        pytest.param("mixtral", torch.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_capped_attention_equals_transformers(family, dtype, tmp_path, monkeypatch):
    with monkeypatch.context() as patch:
        capped_hook = partial(hooks.attention, softcap=CAP)
        patch.setitem(AttentionInterface._global_mapping, hooks.NAME, capped_hook)
        captured = capture(checkpoint(family), BATCH, CONTEXT, dtype)
    assert {a.softcap for a in captured.geometry.attention} == {CAP}
    rng, model = fresh_rng(), checkpoint(family).load_torch(experts_implementation="eager")
    with monkeypatch.context() as patch:
        patch.setattr(CODE[family], "eager_attention_forward", partial(capped, softcap=CAP))
        margin = SUMS if dtype == torch.float32 else 1e-2  # constants are rounded to bf16
        texts = draw(rng, model, captured.geometry, (), LENGTHS, margin)
        want = [reference_logits(model, text) for text in texts]
    uncapped = [reference_logits(model, text) for text in texts]
    built = build_graph(checkpoint(family), tmp_path, captured=captured)
    nodes = [node for node in built.model.graph if node.op_type == "AsymKVAttention"]
    assert len(nodes) == len(captured.geometry.attention)
    got = two_slots(Stepper(session(built.save("model.onnx"), native.cpu_library()), built.constants), *texts)
    tolerance = 1e-4 if dtype == torch.float32 else 1e-2
    for ours, theirs, without in zip(got, want, uncapped, strict=True):
        assert np.abs(ours - theirs).max() <= tolerance * np.ptp(theirs)
        assert np.abs(without - theirs).max() > 3 * tolerance * np.ptp(theirs)  # the cap matters
