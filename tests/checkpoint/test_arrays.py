"""Arrays and tensors share memory and dtype."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest
import torch

from moec.checkpoint.arrays import to_numpy, to_torch

PAIRS = [
    (np.float32, torch.float32),
    (np.float16, torch.float16),
    (ml_dtypes.bfloat16, torch.bfloat16),
    (ml_dtypes.float8_e4m3fn, torch.float8_e4m3fn),
    (np.int8, torch.int8),
]


@pytest.mark.parametrize(("array_type", "tensor_type"), PAIRS)
def test_round_trip(array_type, tensor_type):
    array = np.arange(-6, 6).reshape(3, 4).astype(array_type)
    tensor = to_torch(array)
    assert tensor.dtype == tensor_type
    assert tensor.float().tolist() == array.astype(np.float32).tolist()
    back = to_numpy(tensor)
    assert back.dtype == array.dtype
    assert np.shares_memory(back, array)
