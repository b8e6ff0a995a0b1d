from __future__ import annotations

import json
import struct

import numpy as np
import pytest

from moec.errors import MoecError
from moec.reference.store import StoreHeader


def test_places_of_layers():
    header = StoreHeader.plan("int4", 64, [(0, 8, 65536), (3, 4, 4096)])
    assert header.header_bytes == 4096
    assert [layer.offset for layer in header.layers] == [2 << 20, 4 << 20]
    assert header.file_bytes == (4 << 20) + 4 * 4096
    assert header.hash_index(3) == 8
    with pytest.raises(MoecError, match="no layer 1"):
        header.hash_index(1)


def test_bytes_by_hand():
    data = StoreHeader.plan("bf16", 64, [(2, 8, 65536)]).pack()
    magic, version, header_bytes, json_bytes = struct.unpack("<4sIQQ", data[:24])
    assert (magic, version, header_bytes, len(data)) == (b"MOEX", 1, 4096, 4096)
    layers = json.loads(data[24 : 24 + json_bytes])["layers"]
    assert layers == [{"layer": 2, "num_experts": 8, "blob_bytes": 65536, "offset": 2 << 20}]


@pytest.mark.parametrize("count", [1, 200])
def test_headers_round_trip_and_grow(count):
    header = StoreHeader.plan("int4", 64, [(i, 128, 8192) for i in range(count)])
    data = header.pack()
    assert StoreHeader.parse(data) == header
    assert len(data) == header.header_bytes
    assert (header.header_bytes > 4096) == (count == 200)
    assert header.layers[0].offset >= header.header_bytes + 8 * header.num_experts


def test_hash_table():
    header = StoreHeader.plan("int4", 64, [(0, 3, 4096)])
    table = np.array([5, 2**63, 7], "<u8")
    data = np.frombuffer(header.pack() + table.tobytes(), np.uint8)
    assert header.hashes(data).tolist() == table.tolist()


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda d: b"XXXX" + d[4:], "not an expert store"),
        (lambda d: d[:10], "not an expert store"),
        (lambda d: d[:4] + b"\2" + d[5:], "version 2"),
        (lambda d: d[:30] + b"\xff" + d[31:], "damaged"),
        (lambda d: d[:40], "damaged"),
    ],
)
def test_damage_is_reported(damage, message):
    data = StoreHeader.plan("int4", 64, [(0, 3, 4096)]).pack()
    with pytest.raises(MoecError, match=message):
        StoreHeader.parse(damage(data))
