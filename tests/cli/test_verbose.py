"""`moec build -v` says which check of which rule failed, and where."""

from __future__ import annotations

import pytest

from moec.cli.main import execute
from tests.helpers.captured import checkpoint


@pytest.mark.parametrize(
    ("family", "reason"),
    [
        ("phimoe", "no softmax, sigmoid or softmax-after-top-k router computes the same (operators: Abs, "),
        pytest.param(
            "llama4_text",
            "its ids and weights depend on more than the tokens that the experts see",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_routers_that_stay_standard_are_named_with_the_reason(family, reason, tmp_path, capsys):
    command = ["build", str(checkpoint(family).path), "-o", str(tmp_path / "bundle"), "-v"]
    assert execute([*command, "--plan-only", "--target", "cpu", "--context", "64"]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  router ")]
    assert "0 applied" in line
    for layer in range(2):
        assert f"router of layer {layer}: {reason}" in line
