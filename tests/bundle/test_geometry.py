"""Geometry survives JSON exactly, reads newer minors, and refuses records with holes."""

from __future__ import annotations

import json
import random

import pytest

from moec.bundle.geometry import AttentionLayer, Geometry, MoELayer, StateTensor
from moec.errors import MoecError


def random_geometry(rng: random.Random) -> Geometry:
    attention = tuple(
        AttentionLayer(i, 2 * h, h, 64, rng.choice([64, 96]), rng.random(), rng.choice([0, 8]))
        for i, h in enumerate(rng.choices([1, 2, 4], k=3))
    )
    moe = tuple(
        MoELayer(i, 8, 2, 64, rng.randrange(16, 99), "silu", True, False, f"m.{i}.gate_up", f"m.{i}.down")
        for i in (0, 2)
    )
    states = (StateTensor(1, "conv0", (rng.randrange(1, 99), 4)), StateTensor(1, "recurrent", (2, 3, 4)))
    return Geometry("qwen2_moe", rng.randrange(9, 999), 64, 256, attention, moe, states)


def test_json_round_trip_is_exact():
    seed = random.randrange(2**32)
    print("seed", seed)
    geometry = random_geometry(random.Random(seed))
    assert Geometry.from_json(json.loads(json.dumps(geometry.to_json()))) == geometry


def test_a_tree_without_states_has_none():
    tree = random_geometry(random.Random(1)).to_json()
    del tree["states"]
    assert Geometry.from_json(tree).states == ()


def test_unknown_keys_of_a_newer_minor_are_ignored():
    geometry = random_geometry(random.Random(1))
    tree = geometry.to_json()
    tree["later"] = 1
    tree["attention"][0]["later"] = 2
    assert Geometry.from_json(tree) == geometry


def test_a_missing_key_is_named():
    tree = random_geometry(random.Random(1)).to_json()
    del tree["moe"][0]["top_k"]
    with pytest.raises(MoecError, match="top_k"):
        Geometry.from_json(tree)
