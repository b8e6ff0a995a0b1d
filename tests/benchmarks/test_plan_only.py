"""Plans at real size: the bars of time, memory and engine size; and what they do not depend on."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import pytest

from benchmarks.plan_only import CONFIGS, measure
from tests.helpers.trt_engine import need_tensorrt


def config(**changes) -> str:
    return json.dumps(json.loads((CONFIGS / "qwen3-30b-a3b" / "config.json").read_text()) | changes)


@cache
def planned(layers: int) -> dict[str, float]:
    """The Qwen3-30B-A3B shape with so many layers (it has 48)."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "config.json").write_text(config(num_hidden_layers=layers))
        return measure(Path(folder), "auto")


def test_every_config_is_one_that_moec_plans():
    from moec.checkpoint import open_checkpoint

    sizes = {f.name: open_checkpoint(f, weights=False).config.num_hidden_layers for f in CONFIGS.iterdir()}
    assert sizes == {
        "deepseek-v2-lite": 27,
        "gpt-oss-20b": 24,
        "mixtral-8x7b": 32,
        "qwen3-235b-a22b": 94,
        "qwen3-30b-a3b": 48,
    }


@pytest.mark.slow
def test_a_30b_model_is_planned_on_a_laptop():
    need_tensorrt()
    facts = planned(48)
    assert facts["cpu s"] < 120  # wall time depends on what else runs
    assert facts["engine cpu s"] < 30
    assert facts["build MB"] + facts["engine process MB"] < 1500
    assert facts["engine process MB"] < 700
    assert facts["engine MB"] < 60


@pytest.mark.slow
def test_time_and_memory_grow_linearly_with_layers():
    """The step to 94 layers is in benchmarks/size.md; this one is as large and costs less."""
    need_tensorrt()
    small, large = planned(24), planned(48)
    for name in ("cpu s", "engine cpu s", "build MB", "engine process MB", "engine MB"):
        assert large[name] < 2.2 * small[name]
    assert large["nodes"] < 2.2 * small["nodes"]


@pytest.mark.slow
def test_the_bytes_of_experts_cost_nothing(tmp_path):
    need_tensorrt()
    rows = []
    for size in (256, 8192):
        (tmp_path / "config.json").write_text(config(num_hidden_layers=2, moe_intermediate_size=size))
        rows.append(measure(tmp_path, "sm_89"))
    small, large = rows
    assert large["weights GB"] > 5 * small["weights GB"]
    assert large["engine MB"] == pytest.approx(small["engine MB"], rel=0.01)
    for name in ("build MB", "engine process MB"):
        assert large[name] < small[name] + 30
    assert large["cpu s"] < 1.3 * small["cpu s"]
