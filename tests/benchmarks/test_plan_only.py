"""Plans at real size: the bars of time, memory and engine size; and what they do not depend on."""

from __future__ import annotations

import json
import tempfile
from functools import cache
from pathlib import Path

import pytest

from benchmarks.plan_only import CONFIGS, measure
from tests.helpers.trt_engine import need_tensorrt

GROWING = ("cpu s", "engine cpu s", "build MB", "engine process MB", "engine MB", "nodes")


def config(**changes) -> str:
    return json.dumps(json.loads((CONFIGS / "qwen3-30b-a3b" / "config.json").read_text()) | changes)


@cache
def planned(layers: int, attempt: int = 0) -> dict[str, float]:
    """The Qwen3-30B-A3B shape with so many layers (it has 48); each attempt is measured anew."""
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
    """The step to 94 layers is in benchmarks/size.md; this one is as large and costs less.

    What else runs costs CPU seconds too (caches, clocks): the least of up to three attempts counts.
    """
    need_tensorrt()
    for attempts in (1, 2, 3):
        small, large = _least(24, attempts), _least(48, attempts)
        if all(large[name] < 2.2 * small[name] for name in GROWING):
            break
    for name in GROWING:
        assert large[name] < 2.2 * small[name]


def _least(layers: int, attempts: int) -> dict[str, float]:
    runs = [planned(layers, attempt) for attempt in range(attempts)]
    return {name: min(run[name] for run in runs) for name in GROWING}


@pytest.mark.slow
def test_the_bytes_of_experts_cost_nothing(tmp_path):
    need_tensorrt()
    for size in (256, 8192):
        (tmp_path / str(size)).mkdir()
        changes = {"num_hidden_layers": 2, "moe_intermediate_size": size}
        (tmp_path / str(size) / "config.json").write_text(config(**changes))
    for _ in range(3):  # another process may cost one of the two CPU seconds
        small, large = (measure(tmp_path / size, "sm_89") for size in ("256", "8192"))
        if large["cpu s"] < 1.3 * small["cpu s"]:
            break
    assert large["weights GB"] > 5 * small["weights GB"]
    assert large["engine MB"] == pytest.approx(small["engine MB"], rel=0.01)
    for name in ("build MB", "engine process MB"):
        assert large[name] < small[name] + 30
    assert large["cpu s"] < 1.3 * small["cpu s"]
