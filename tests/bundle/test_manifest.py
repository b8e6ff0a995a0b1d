"""The manifest round-trips, every flipped byte is noticed, versions follow the stated policy."""

from __future__ import annotations

import json
import random

import pytest

from moec.bundle.manifest import parse, read_manifest, render
from moec.errors import MoecError
from tests.bundle.bundles import small_manifest


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


def test_round_trip_is_exact():
    manifest = small_manifest()
    assert parse(render(manifest.to_json()), "here") == manifest


def test_text_is_deterministic_and_readable():
    data = render(small_manifest().to_json())
    assert data == render(small_manifest().to_json())
    assert json.loads(data)["schema_version"] == "1.0"


def test_every_flipped_byte_is_found(rng):
    data = render(small_manifest('café "quoted"').to_json())
    for position in range(len(data)):
        damaged = bytearray(data)
        damaged[position] ^= 1 << rng.randrange(8)
        with pytest.raises(MoecError) as caught:
            parse(bytes(damaged), "manifest.json")
        assert "\n" not in caught.value.what
        assert any(word in caught.value.what for word in ("damaged", "newer", "no longer"))


def test_a_cut_manifest_is_found(rng):
    data = render(small_manifest().to_json())
    for length in (0, 1, rng.randrange(2, len(data)), len(data) - 1):
        with pytest.raises(MoecError, match="damaged"):
            parse(data[:length], "manifest.json")


def test_a_newer_minor_is_read():
    tree = small_manifest().to_json() | {"schema_version": "1.7", "new_section": {"x": 1}}
    tree["tokenizer"]["new_fact"] = 1
    tree["kv"][0]["new_field"] = 1
    assert parse(render(tree), "here").schema_version == "1.7"


def test_a_newer_major_is_refused_with_both_versions():
    tree = small_manifest().to_json() | {"schema_version": "2.0"}
    with pytest.raises(
        MoecError, match=r"newer moec: its schema is 2\.0, this one reads 1\.x \(here\)"
    ) as caught:
        parse(render(tree), "here")
    assert "Update moec" in str(caught.value)


def test_a_newer_major_edited_by_hand_is_refused_too():
    data = render(small_manifest().to_json()).replace(b'"schema_version": "1.0"', b'"schema_version": "9.0"')
    with pytest.raises(MoecError, match=r"newer moec.*checksum does not match"):
        parse(data, "here")


def test_a_missing_field_is_named():
    tree = small_manifest().to_json()
    del tree["experts_format"]
    with pytest.raises(MoecError, match="experts_format"):
        parse(render(tree), "here")


def test_a_folder_without_a_manifest_is_no_bundle(tmp_path):
    with pytest.raises(MoecError, match="not a bundle"):
        read_manifest(tmp_path)
    with pytest.raises(MoecError, match="no bundle at this path"):
        read_manifest(tmp_path / "missing")
