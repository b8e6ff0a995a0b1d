"""experts.moex: every stored expert is the checkpoint's, whatever way it lay there; damage is found."""

from __future__ import annotations

import errno
import json
import os

import ml_dtypes
import numpy as np
import pytest
import xxhash

from moec.bundle.geometry import Geometry, MoELayer
from moec.errors import MoecError
from moec.pack.experts_store import blob_layout, checked_bytes, open_experts, plan_store, write_experts
from moec.reference.experts import unpack_expert
from tests.helpers.fake_checkpoint import ArrayCheckpoint

E, H, INNER = 4, 72, 40


@pytest.fixture
def rng() -> np.random.Generator:
    seed = int(np.random.SeedSequence().generate_state(1)[0])
    print("seed", seed)
    return np.random.default_rng(seed)


def bf16(rng, *shape) -> np.ndarray:
    return rng.normal(size=shape).astype(ml_dtypes.bfloat16)


def moe(layer, *, gated=True, bias=False, transposed=False, interleaved=False) -> MoELayer:
    names = {"gate_up": f"{layer}.gu", "down": f"{layer}.d"}
    if bias:
        names |= {"gate_up_bias": f"{layer}.gub", "down_bias": f"{layer}.db"}
    activation = "silu" if gated else "relu2"
    return MoELayer(
        layer,
        E,
        2,
        H,
        INNER,
        activation,
        gated,
        bias,
        **names,
        transposed=transposed,
        interleaved=interleaved,
    )


def canonical(rng, layer: MoELayer) -> dict[str, np.ndarray]:
    rows = 2 * INNER if layer.gated else INNER
    return {
        "gu": bf16(rng, E, rows, H),
        "d": bf16(rng, E, H, INNER),
        "gub": bf16(rng, E, rows),
        "db": bf16(rng, E, H),
    }


def as_stored(layer: MoELayer, parts: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """The same weights the way the checkpoint has them."""
    stored = dict(parts)
    if layer.interleaved:
        for name in ("gu", "gub"):
            mixed = np.empty_like(parts[name])
            mixed[:, 0::2], mixed[:, 1::2] = parts[name][:, :INNER], parts[name][:, INNER:]
            stored[name] = mixed
    if layer.transposed:
        stored |= {name: stored[name].transpose(0, 2, 1) for name in ("gu", "d")}
    return {f"{layer.layer}.{name}": value for name, value in stored.items()}


VARIANTS = [
    {},
    {"transposed": True},
    {"bias": True, "transposed": True, "interleaved": True},
    {"bias": True},
    {"gated": False},
]


@pytest.mark.parametrize("weight_format", ["bf16", "int4"])
@pytest.mark.parametrize("options", VARIANTS)
def test_experts_come_back(tmp_path, rng, options, weight_format):
    layers = [moe(1, **options), moe(4, **options)]
    parts = {layer.layer: canonical(rng, layer) for layer in layers}
    arrays = {k: v for layer in layers for k, v in as_stored(layer, parts[layer.layer]).items()}
    geometry = Geometry("x", 9, H, 64, (), tuple(layers))
    write_experts(tmp_path / "experts.moex", geometry, ArrayCheckpoint(arrays), weight_format)
    store = open_experts(tmp_path / "experts.moex")
    for layer in layers:
        blobs = store.layer(layer.layer)
        for expert in range(E):
            got = unpack_expert(blob_layout(layer, weight_format), blobs[expert])
            check(
                got,
                {k: v[expert].astype(np.float32) for k, v in parts[layer.layer].items()},
                layer,
                weight_format,
            )


def check(got, want, layer, weight_format):
    for value, name in ((got.gate_up, "gu"), (got.down, "d")):
        error = np.linalg.norm(value - want[name]) / np.linalg.norm(want[name])
        assert error == 0 if weight_format == "bf16" else 0 < error < 0.12
    if layer.has_bias:
        np.testing.assert_array_equal(got.gate_up_bias, want["gub"])
        np.testing.assert_array_equal(got.down_bias, want["db"])


@pytest.fixture
def written(tmp_path, rng):
    layer = moe(0)
    geometry = Geometry("x", 9, H, 64, (), (layer, moe(2)))
    arrays = as_stored(layer, canonical(rng, layer)) | as_stored(moe(2), canonical(rng, moe(2)))
    checkpoint = ArrayCheckpoint(arrays)
    seen = []
    header = write_experts(tmp_path / "experts.moex", geometry, checkpoint, "int4", seen.append)
    assert sum(seen) == sum(p.num_experts * p.blob_bytes for p in header.layers)
    return tmp_path / "experts.moex", geometry, checkpoint


def test_the_bytes_follow_the_interface(written):
    """Read with nothing but the text of the interface."""
    path = written[0]
    data = path.read_bytes()
    assert data[:4] == b"MOEX"
    header_bytes, json_bytes = (int.from_bytes(data[i : i + 8], "little") for i in (8, 16))
    header = json.loads(data[24 : 24 + json_bytes])
    assert (header["format"], header["group_size"]) == ("int4", 64)
    hashes = np.frombuffer(data[header_bytes : header_bytes + 8 * 2 * E], "<u8")
    for index, layer in enumerate(header["layers"]):
        assert layer["offset"] % (2 << 20) == 0
        assert layer["blob_bytes"] % 4096 == 0
        for expert in range(E):
            start = layer["offset"] + expert * layer["blob_bytes"]
            blob = data[start : start + layer["blob_bytes"]]
            assert hashes[index * E + expert] == xxhash.xxh64(blob, seed=0).intdigest()
    last = header["layers"][-1]
    assert len(data) == last["offset"] + E * last["blob_bytes"]


def test_experts_are_read_one_by_one_and_bytes_repeat(written, tmp_path):
    path, geometry, checkpoint = written
    assert checkpoint.reads == 2 * E * 2
    write_experts(tmp_path / "again.moex", geometry, checkpoint, "int4")
    assert (tmp_path / "again.moex").read_bytes() == path.read_bytes()


def test_hashes_and_layers_by_number(written):
    store = open_experts(written[0])
    want = [xxhash.xxh64_intdigest(np.ascontiguousarray(blob)) for blob in store.layer(2)]
    assert store.hashes(2).tolist() == want
    with pytest.raises(MoecError, match="no layer 1"):
        store.layer(1)


def test_damage(written, tmp_path):
    data = written[0].read_bytes()
    broken = tmp_path / "broken.moex"
    for content, message in (
        (data[:-1], "damaged: it has"),
        (b"", "cannot be read"),
        (b"JUNK" + data[4:], "not an"),
    ):
        broken.write_bytes(content)
        with pytest.raises(MoecError, match=message):
            open_experts(broken)
    with pytest.raises(MoecError, match="cannot be read"):
        open_experts(tmp_path / "missing.moex")


def test_the_head_covers_header_and_table(written):
    header = plan_store(written[1], "int4")
    assert checked_bytes(header) == 4096 + 8 * 2 * E


def test_nan_names_layer_and_expert(written, tmp_path):
    _, geometry, checkpoint = written
    checkpoint.arrays["2.d"][3, 0, 0] = np.nan
    with pytest.raises(MoecError, match="layer 2, expert 3"):
        write_experts(tmp_path / "nan.moex", geometry, checkpoint, "int4")


def test_a_full_disk_names_the_file(written, tmp_path):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    _, geometry, checkpoint = written
    with pytest.raises(MoecError, match=r"full\.moex, which needs \d+ bytes"):
        write_experts(tmp_path / "full.moex", geometry, checkpoint, "int4", full)
