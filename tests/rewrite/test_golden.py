"""The graphs in graphs/ are what tiny models give today. MOEC_UPDATE_GOLDEN=1 rewrites them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moec.rewrite import MOEC_PASSES, run
from moec.rewrite.golden import graph_text
from tests.helpers.captured import FAMILIES, captured
from tests.helpers.families import OVERRIDES
from tests.rewrite.test_pipeline import context

FOLDER = Path(__file__).parents[2] / "graphs"


ALL = [*FAMILIES, *(pytest.param(f, marks=pytest.mark.slow) for f in OVERRIDES if f not in FAMILIES)]


@pytest.mark.parametrize("family", ALL)
@pytest.mark.parametrize("stage", ["exported", "rewritten"])
def test_golden_text(family, stage):
    model = captured(family).model.clone()
    if stage == "rewritten":
        run(model, context(family), passes=MOEC_PASSES)
    path, text = FOLDER / family / f"{stage}.txt", graph_text(model)
    if os.environ.get("MOEC_UPDATE_GOLDEN"):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    assert path.read_text(encoding="utf-8") == text, (
        f"{path} differs: MOEC_UPDATE_GOLDEN=1, then review the diff"
    )


def test_every_family_and_no_other_has_its_graphs():
    assert {p.name for p in FOLDER.iterdir() if p.is_dir()} == set(OVERRIDES)


def test_text_says_what_changes():
    model = captured("qwen2_moe").model.clone()
    before = graph_text(model)
    assert before == graph_text(captured("qwen2_moe").model.clone())
    softmax = next(n for n in model.graph if n.op_type == "Softmax")
    softmax.attributes["axis"] = type(softmax.attributes["axis"])("axis", softmax.attributes["axis"].type, 0)
    assert before != graph_text(model)
