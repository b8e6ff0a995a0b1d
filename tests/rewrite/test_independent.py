"""Which graphs say that their rows are independent, and that the runtime then pads nothing."""

from __future__ import annotations

import pytest

from moec.rewrite import run
from moec.rewrite.independent import KEY
from tests.helpers.captured import captured
from tests.rewrite.test_pipeline import context


@pytest.mark.parametrize(
    ("family", "weights", "marked"),
    [("qwen2_moe", "int4", True), ("mixtral", "int4", True), ("qwen2_moe", "bf16", False)],
)
def test_graphs_without_stock_products_are_marked(family, weights, marked):
    model = captured(family).model.clone()
    run(model, context(family, weights=weights))
    assert (model.metadata_props.get(KEY) == "1") == marked
