"""A TensorRT-RTX engine of every family: it builds without a GPU, every layer is the plugin it should be."""

from __future__ import annotations

import numpy as np
import pytest
from safetensors.numpy import save_file

from moec.compile.stage import build_engines
from moec.compile.targets import parse_targets
from moec.rewrite.pipeline import CPU_PASSES, MOEC_PASSES
from tests.helpers.built import build_graph
from tests.helpers.captured import BATCH, CONTEXT, captured, checkpoint
from tests.helpers.families import OVERRIDES
from tests.helpers.trt_engine import need_tensorrt


@pytest.mark.slow
@pytest.mark.parametrize("family", OVERRIDES)
def test_engine_builds_and_has_its_plugins(family, tmp_path):
    need_tensorrt()
    sizes = dict(batch=BATCH, context=CONTEXT)
    options = dict(
        kv="mkv2", weights="int4", experts="int4", compute="int8", captured=captured(family), **sizes
    )
    rewritten = build_graph(checkpoint(family), tmp_path / "moec", passes=MOEC_PASSES, **options).model
    built = build_graph(checkpoint(family), tmp_path, passes=MOEC_PASSES + CPU_PASSES, **options)
    tensors = {n: np.ascontiguousarray(a) for n, a in built.constants.items() if n.startswith("kv.")}
    save_file(tensors, tmp_path / "calibration.safetensors")
    (engine,) = build_engines(rewritten, tmp_path, parse_targets("sm_80"), batch=BATCH, chunk=16)
    kinds = [n.op_type for n in rewritten.graph if n.domain == "moec"]
    for profile in engine.report.profiles:
        for kind in ("AsymKVAttention", "PipelinedMoE", "Experts"):
            assert profile.plugin_layers.get(kind, 0) == kinds.count(kind)
    assert kinds.count("AsymKVAttention") == len(built.geometry.attention)
    assert kinds.count("PipelinedMoE") + kinds.count("Experts") == len(built.geometry.moe)
