"""open_bundle finds every kind of damage it answers for, with a message that names the file."""

from __future__ import annotations

import random
import shutil
from pathlib import Path

import pytest

from moec.bundle.reader import open_bundle
from moec.errors import MoecError
from tests.bundle.bundles import write_bundle


@pytest.fixture
def rng() -> random.Random:
    seed = random.randrange(2**32)
    print("seed", seed)
    return random.Random(seed)


@pytest.fixture
def bundle(tmp_path, rng) -> Path:
    write_bundle(tmp_path / "out", rng)
    return tmp_path / "out"


def flip(path: Path, position: int, bit: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 1 << bit
    path.write_bytes(data)


def test_an_intact_bundle_opens_and_moves(bundle, tmp_path):
    shutil.move(bundle, tmp_path / "elsewhere")
    opened = open_bundle(tmp_path / "elsewhere")
    assert opened.file("weights.safetensors").stat().st_size == 3000
    with pytest.raises(MoecError, match=r"no engine\.plan"):
        opened.file("engine.plan")


@pytest.mark.parametrize(
    "name", ["manifest.json", "weights.safetensors", "model.onnx", "tokenizer/tokenizer.json"]
)
def test_flipped_bytes_are_found(bundle, rng, name):
    intact = (bundle / name).read_bytes()
    for position in {0, len(intact) - 1, rng.randrange(len(intact))}:
        flip(bundle / name, position, rng.randrange(8))
        with pytest.raises(MoecError) as caught:
            open_bundle(bundle)
        assert name.rsplit("/")[-1] in str(caught.value)
        (bundle / name).write_bytes(intact)
    open_bundle(bundle)


def test_the_store_is_covered_up_to_its_table(bundle):
    flip(bundle / "experts.moex", 1000, 3)
    open_bundle(bundle)
    flip(bundle / "experts.moex", 511, 3)
    with pytest.raises(MoecError, match=r"experts\.moex is damaged"):
        open_bundle(bundle)


def test_missing_and_cut_files(bundle):
    data = (bundle / "model.onnx").read_bytes()
    (bundle / "model.onnx").write_bytes(data[:-1])
    with pytest.raises(MoecError, match="it has 699 bytes, the manifest says 700"):
        open_bundle(bundle)
    (bundle / "model.onnx").unlink()
    with pytest.raises(MoecError, match=r"model\.onnx is missing"):
        open_bundle(bundle)


def test_verification_can_be_skipped(bundle):
    flip(bundle / "weights.safetensors", 5, 0)
    assert open_bundle(bundle, verify=False).manifest.context == 512
