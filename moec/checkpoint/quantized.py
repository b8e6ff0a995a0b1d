"""Quantized checkpoints, dequantized as they are read: block-scaled fp8 and mxfp4.

fp8 (DeepSeek-V3, Qwen3-FP8): a matrix `X` in float8_e4m3fn and `X_scale_inv`, one fp32 factor for every block
of `weight_block_size` elements (128x128). mxfp4 (GPT-OSS; OCP Microscaling Formats 1.0): `X_blocks`
u8 `[E,rows,G,16]`, two e2m1 codes a byte, low nibble first, and `X_scales` u8 `[E,rows,G]`, an exponent with
bias 127 for every 32 columns; transformers keeps X transposed, `[E,columns,rows]`. Results are bf16, as
transformers' own dequantization gives them.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import ml_dtypes
import numpy as np

from moec.checkpoint.safetensors_file import SafetensorsFile
from moec.errors import MoecError

METHODS = ("fp8", "mxfp4")
_E2M1 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)
_SCALES = ("_scale_inv", "_scale")
_FLOAT8 = (np.dtype(ml_dtypes.float8_e4m3fn), np.dtype(ml_dtypes.float8_e5m2))
_BF16 = ml_dtypes.bfloat16


class StoredTensors:
    """The tensors of a checkpoint by name, quantized ones as if they were not.

    Args:
        where: Tensor name -> its file.
        config: `quantization_config` of config.json; None if it has none.
    """

    def __init__(self, where: Mapping[str, SafetensorsFile], config: Mapping[str, Any] | None = None) -> None:
        self._where = where
        self._block = tuple((config or {}).get("weight_block_size") or (128, 128))
        packed = [n.removesuffix("_blocks") for n in where if n.endswith("_blocks")]
        self._mxfp4 = {n for n in packed if f"{n}_scales" in where} if config else set()
        self._scale = {n: s for n in where if (s := self._scale_of(n))} if config else {}

    def _scale_of(self, name: str) -> str | None:
        if self._where[name].tensors[name].dtype not in _FLOAT8:
            return None
        return next((name + s for s in _SCALES if name + s in self._where), None)

    def names(self) -> list[str]:
        """Names of all tensors; scales and blocks are not tensors of their own."""
        parts = {f"{n}{s}" for n in self._mxfp4 for s in ("_blocks", "_scales")} | set(self._scale.values())
        return [n for n in self._where if n not in parts] + sorted(self._mxfp4)

    def read(self, name: str, expert: int | None = None) -> np.ndarray:
        """The tensor, or `[expert]` of it; only what that takes is read.

        Raises:
            MoecError: A scale does not fit its tensor.
        """
        if name in self._mxfp4:
            blocks, scales = (self._part(f"{name}{s}", expert) for s in ("_blocks", "_scales"))
            return np.swapaxes(mxfp4(blocks, scales), -1, -2)
        if name in self._scale:
            scale = self._part(self._scale[name], expert)
            return block_scaled(self._part(name, expert), scale, self._block, name)
        return self._part(name, expert)

    def _part(self, name: str, expert: int | None) -> np.ndarray:
        array = self._where[name].view(name)
        return array if expert is None else array[expert]


def block_scaled(codes: np.ndarray, scale: np.ndarray, block: tuple[int, int], name: str = "") -> np.ndarray:
    """fp8 codes `[...,N,K]` times their block's factor -> bf16.

    Args:
        codes: float8.
        scale: `[...,ceil(N/block[0]),ceil(K/block[1])]`, or one number for the whole tensor.
        block: Rows and columns of a block.
        name: For messages.

    Raises:
        MoecError: The scale has another shape.
    """
    values, scale = codes.astype(np.float32), scale.astype(np.float32)
    if scale.size == 1:
        return (values * scale.reshape(())).astype(_BF16)
    rows, columns = codes.shape[-2:]
    wanted = (*codes.shape[:-2], -(-rows // block[0]), -(-columns // block[1]))
    if scale.shape != wanted:
        raise MoecError(f"{name} has a scale of shape {scale.shape}, {wanted} was expected")
    scale = np.repeat(np.repeat(scale, block[0], -2)[..., :rows, :], block[1], -1)[..., :columns]
    return (values * scale).astype(_BF16)


def mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Blocks u8 `[...,rows,G,16]` and scales u8 `[...,rows,G]` -> bf16 `[...,rows,32*G]`."""
    codes = np.stack([blocks & 15, blocks >> 4], -1).reshape(*blocks.shape[:-1], -1)
    values = np.ldexp(_E2M1[codes], scales.astype(np.int32)[..., None] - 127)
    return values.astype(_BF16).reshape(*blocks.shape[:-2], -1)
