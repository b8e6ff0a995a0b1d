"""A TensorRT-RTX engine of every family: it builds without a GPU, every layer is the plugin it should be."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from moec.compile.stage import build_engines
from moec.compile.targets import parse_targets
from moec.rewrite import MOEC_PASSES, run
from tests.helpers.built import build_graph
from tests.helpers.captured import BATCH, CONTEXT, captured, checkpoint
from tests.helpers.families import OVERRIDES
from tests.helpers.trt_engine import need_tensorrt
from tests.rewrite.test_pipeline import context


@pytest.mark.slow
@pytest.mark.parametrize("family", OVERRIDES)
def test_engine_builds_and_has_its_plugins(family, tmp_path):
    need_tensorrt()
    rewritten = captured(family).model.clone()
    run(rewritten, context(family, weights="int4", experts="int4", compute="int8"), passes=MOEC_PASSES)
    built = build_graph(
        checkpoint(family), tmp_path, kv="mkv2", weights="int4", experts="int4", compute="int8",
        captured=captured(family), batch=BATCH, context=CONTEXT,
    )  # fmt: skip
    tensors = {n: np.ascontiguousarray(a) for n, a in built.constants.items() if n.startswith("kv.")}
    save_file(tensors, tmp_path / "calibration.safetensors")
    (engine,) = build_engines(rewritten, tmp_path, parse_targets("sm_80"), batch=BATCH, chunk=16)
    kinds = [n.op_type for n in rewritten.graph if n.domain == "moec"]
    for profile in engine.report.profiles:
        for kind in ("AsymKVAttention", "PipelinedMoE", "Experts"):
            assert profile.plugin_layers.get(kind, 0) == kinds.count(kind)
    assert kinds.count("AsymKVAttention") == len(built.geometry.attention)
    assert kinds.count("PipelinedMoE") + kinds.count("Experts") == len(built.geometry.moe)
