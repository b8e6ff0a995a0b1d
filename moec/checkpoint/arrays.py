"""NumPy arrays and torch tensors over the same memory, bf16 included (NumPy has it through ml_dtypes)."""

from __future__ import annotations

import warnings

import ml_dtypes
import numpy as np
import torch

_AS_BITS = {
    np.dtype(ml_dtypes.bfloat16): (np.uint16, torch.bfloat16),
    np.dtype(ml_dtypes.float8_e4m3fn): (np.uint8, torch.float8_e4m3fn),
    np.dtype(ml_dtypes.float8_e5m2): (np.uint8, torch.float8_e5m2),
}
_BITS_OF = {t: (b, d) for d, (b, t) in _AS_BITS.items()}


def to_torch(array: np.ndarray) -> torch.Tensor:
    """The array as a tensor of the same dtype, without a copy. Do not write to it: it may be mapped."""
    bits, dtype = _AS_BITS.get(array.dtype, (None, None))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns about read-only memory; nothing here writes
        if bits is None:
            return torch.from_numpy(array)
        return torch.from_numpy(array.view(bits)).view(dtype)


def to_numpy(tensor: torch.Tensor) -> np.ndarray:
    """The tensor as an array of the same dtype, without a copy if it is contiguous."""
    tensor = tensor.detach().contiguous()
    if tensor.dtype not in _BITS_OF:
        return tensor.numpy()
    bits, dtype = _BITS_OF[tensor.dtype]
    return tensor.view(torch.uint16 if bits is np.uint16 else torch.uint8).numpy().view(dtype)
