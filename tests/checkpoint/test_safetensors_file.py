"""The mapped reader against the safetensors library's writer."""

from __future__ import annotations

import json

import numpy as np
import pytest
from safetensors.numpy import save_file

from moec.checkpoint.safetensors_file import SafetensorsFile
from moec.errors import MoecError
from tests.helpers.rng import fresh_rng


def test_reads_what_the_library_writes(tmp_path):
    rng = fresh_rng()
    tensors = {
        "a": rng.standard_normal((3, 5)).astype(np.float32),
        "b": rng.integers(-9, 9, (7,)).astype(np.int8),
        "c": rng.standard_normal((2, 1, 4)).astype(np.float16),
        "empty": np.zeros((0, 4), np.float32),
        "scalar": np.array(3, np.int64),
    }
    save_file(tensors, tmp_path / "x.safetensors", metadata={"format": "pt"})
    file = SafetensorsFile(tmp_path / "x.safetensors")
    assert set(file.tensors) == set(tensors)
    for name, array in tensors.items():
        np.testing.assert_array_equal(file.view(name), array)
        assert file.view(name).dtype == array.dtype


def _write(path, header: dict, data: bytes) -> None:
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


def test_unaligned_data_is_read(tmp_path):
    path = tmp_path / "x.safetensors"
    header = {
        "pad": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "x": {"dtype": "F32", "shape": [2], "data_offsets": [1, 9]},
    }
    _write(path, header, b"\0" + np.array([1.5, -2], np.float32).tobytes())
    np.testing.assert_array_equal(SafetensorsFile(path).view("x"), [1.5, -2])


@pytest.mark.parametrize(
    "entry",
    [
        {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]},
        {"dtype": "F99", "shape": [1], "data_offsets": [0, 4]},
        {"dtype": "F32", "shape": [1], "data_offsets": [-4, 0]},
        {"dtype": "F32", "shape": [1]},
        [],
    ],
)
def test_contradictory_entries_are_refused(tmp_path, entry):
    path = tmp_path / "x.safetensors"
    _write(path, {"x": entry}, b"\0" * 8)
    with pytest.raises(MoecError, match="corrupt"):
        SafetensorsFile(path)
