"""Captures do not follow Python's hash seed, although modeling code loops over sets."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
from pathlib import Path

import pytest

from moec.frontend.families.sorted_sets import SortedSet, sorted_sets
from tests.helpers.captured import checkpoint

# In these processes a set of "sliding_attention" and "full_attention" has two orders.
SEEDS = ("1", "3")


def test_sets_of_modeling_code_are_sorted_while_it_is_traced():
    from transformers.models.laguna import modeling_laguna as code

    model = checkpoint("laguna").skeleton()
    model.model.kinds = set("edcba")
    assert "set" not in vars(code)
    with sorted_sets(model):
        assert code.set is SortedSet
        assert list(code.set("edcbaa")) == list(model.model.kinds) == list("abcde")
        assert code.set("ab") == {"b", "a"}
    assert "set" not in vars(code)


def digest(folder: Path) -> dict[str, str]:
    """Every file of a bundle but the report, which has times."""
    files = [path for path in folder.iterdir() if path.name != "build_report.json"]
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


@pytest.mark.slow
@pytest.mark.parametrize("family", ["laguna", "gemma4_text"])
def test_bundles_are_the_same_whatever_the_hash_seed(family, tmp_path):
    command = [sys.executable, "-m", "moec.cli.main", "build", str(checkpoint(family).path)]
    command += ["--target", "cpu", "--context", "64", "--plan-only", "-o"]
    order = "print(list(set(['sliding_attention', 'full_attention'])))"
    orders, bundles = set(), []
    for seed in SEEDS:
        environment = os.environ | {"PYTHONHASHSEED": seed}
        run = [sys.executable, "-c", order]
        orders.add(subprocess.run(run, env=environment, capture_output=True, check=True).stdout)
        subprocess.run([*command, str(tmp_path / seed)], env=environment, capture_output=True, check=True)
        bundles.append(digest(tmp_path / seed))
    assert len(orders) == 2
    assert bundles[0] == bundles[1]
