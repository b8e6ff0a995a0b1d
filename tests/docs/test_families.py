"""docs/families.md is what its script makes of the graphs today."""

from __future__ import annotations

import json
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

from tests.helpers.families import OVERRIDES

ROOT = Path(__file__).parents[2]


def _script():
    spec = spec_from_file_location("make_families", ROOT / "docs" / "make_families.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_is_up_to_date():
    made, page = _script().page(), (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    assert page == made, "run python docs/make_families.py"


def test_every_family_has_a_row_and_a_measured_difference():
    page = (ROOT / "docs" / "families.md").read_text(encoding="utf-8")
    parity = json.loads((ROOT / "graphs" / "parity.json").read_text())
    assert set(parity) == set(OVERRIDES)
    assert all(f"| `{family}` |" in page for family in OVERRIDES)
    assert max(parity.values()) <= 1e-4
