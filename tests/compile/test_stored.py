import numpy as np
import pytest
from safetensors.numpy import save_file

from moec.compile.stored import stored_tensors
from moec.errors import MoecError
from tests.helpers.rng import fresh_rng


def test_offsets_point_at_the_tensors(tmp_path):
    rng = fresh_rng()
    tensors = {
        "a.codes": rng.integers(0, 256, (5, 32), dtype=np.uint8),
        "a.scales": rng.standard_normal((5, 1)).astype(np.float16),
        "b": rng.standard_normal(7).astype(np.float32),
    }
    path = tmp_path / "weights.safetensors"
    save_file(tensors, path)
    data, found = path.read_bytes(), stored_tensors(path)
    assert set(found) == set(tensors)
    for name, array in tensors.items():
        entry = found[name]
        assert data[entry.offset : entry.offset + entry.nbytes] == array.tobytes()
        assert entry.shape == array.shape
    assert [found[name].dtype for name in tensors] == ["U8", "F16", "F32"]


@pytest.mark.parametrize("content", [b"", b"\x08\0\0\0\0\0\0\0not json"])
def test_a_damaged_file_is_an_error(tmp_path, content):
    path = tmp_path / "weights.safetensors"
    path.write_bytes(content)
    with pytest.raises(MoecError, match="cannot be read"):
        stored_tensors(path)
