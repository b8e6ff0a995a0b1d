"""The KV cache format on anyone's tensors: a thin face over moec's calibration and packers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from moec.calibrate.fit import fit_layer
from moec.calibrate.statistics import LayerStatistics
from moec.errors import MoecError
from moec.reference.kv_block import dequantize_block, hadamard, quantize_block
from moec.reference.kv_cache import Calibration, prepare_rows
from moec.reference.kv_layout import QUANTIZED_FORMATS, KVLayout, round_promoted

F32 = np.float32
_NO_LIMIT = 1 << 30


@dataclass(frozen=True)
class CompressedKV:
    """Keys and values of one layer as the cache holds them after the last token.

    Attributes:
        blocks: uint8 `[B,Hkv,NB,block_bytes]`, layout "rows" (docs/kv-cache.md).
        sinks, recent: float16 `[B,Hkv,n,Dk+Dv]`: centred and permuted K, rotated V of the first tokens and
            of those behind the last block.
    """

    blocks: np.ndarray
    sinks: np.ndarray
    recent: np.ndarray
    _restore: tuple[Callable[[np.ndarray], Any], ...] = field(repr=False)

    @property
    def tokens(self) -> int:
        """How many tokens it holds."""
        return self.sinks.shape[2] + 64 * self.blocks.shape[2] + self.recent.shape[2]

    @property
    def nbytes(self) -> int:
        """Bytes of all three arrays."""
        return self.blocks.nbytes + self.sinks.nbytes + self.recent.nbytes

    @property
    def bits_per_element(self) -> float:
        """Bits per number of K and V, with everything: metadata, sinks and recent tokens."""
        batch, heads, _, dims = self.sinks.shape
        return 8 * self.nbytes / (batch * heads * self.tokens * dims)


class AsymmetricKVCacheQuantizer:
    """Quantizes keys and values as moec's cache does.

    K per channel over 64 tokens: 2 bits, and 4 for the outlier channels that calibration chooses. V rotated
    and per token: 2 bits. The first tokens and the newest stay in fp16.

    Args:
        format: mkv2 | mkv2_lean | k4v2 | int8 (hyphens do too).
        outlier_fraction: Share of the K channels with 4 bits; None = the format's (mkv2 1/4, mkv2_lean 1/8,
            k4v2 all, int8 none). The number is rounded to a multiple of 16, a small one to one of 4.
        sink_tokens, recent_tokens: First tokens, and least number of newest ones, in fp16.
        centre: Subtract the mean of K. It cancels in a plain softmax; with a logit soft cap it does not.

    Raises:
        MoecError: an unknown format, or a fraction outside 0..1.

    Example:
        >>> quantizer = AsymmetricKVCacheQuantizer("mkv2").calibrate(k, v, q)  # [B,H,S,D], after RoPE
        >>> packed = quantizer.compress(k, v)
        >>> k_seen, v_seen = quantizer.decompress(packed)
    """

    def __init__(
        self,
        format: str = "mkv2",
        outlier_fraction: float | None = None,
        *,
        sink_tokens: int = 16,
        recent_tokens: int = 64,
        centre: bool = True,
    ) -> None:
        self.format = format.replace("-", "_")
        if self.format not in QUANTIZED_FORMATS:
            raise MoecError(
                f"KV format {format!r} is unknown", hint=f"Known: {', '.join(QUANTIZED_FORMATS)}."
            )
        if outlier_fraction is not None and not 0 <= outlier_fraction <= 1:
            raise MoecError(f"outlier_fraction is {outlier_fraction}, but must be from 0 to 1")
        if outlier_fraction and self.format == "int8":
            raise MoecError("int8 has no outlier channels: leave outlier_fraction out")
        self.outlier_fraction, self.centre = outlier_fraction, centre
        self.sink_tokens, self.recent_tokens = sink_tokens, recent_tokens
        self.layout: KVLayout | None = None
        self.calibration: Calibration | None = None

    def calibrate(self, k: Any, v: Any, q: Any = None) -> AsymmetricKVCacheQuantizer:
        """Fits mean, channel order and references; returns self.

        Args:
            k, v: `[B,Hkv,S,Dk]` and `[B,Hkv,S,Dv]`, NumPy or torch, K after RoPE and norms.
            q: Queries `[B,Hq,S,Dk]`, likewise; None takes every channel as equally important to queries.

        Raises:
            MoecError: shapes that do not fit, NaN, or fewer than sink_tokens + 64 tokens.
        """
        k, v = self._pair(k, v)
        q = k.copy() if q is None else to_numpy("q", q)
        if q.shape[0] != k.shape[0] or q.shape[1] % k.shape[1] or q.shape[2:] != k.shape[2:]:
            raise MoecError(f"q {q.shape} does not fit k {k.shape}", hint="Both are [B,H,S,D].")
        layout = self._new_layout(k, v)
        statistics = LayerStatistics(layout)
        for i in range(len(k)):
            statistics.add(q[i], k[i], v[i])
        if not statistics.blocks:
            what = f"{k.shape[2]} tokens are too few to calibrate on"
            raise MoecError(what, hint=f"At least {self.sink_tokens + 64} are needed.")
        if not statistics.is_finite():
            raise MoecError("q, k or v has NaN or infinity")
        self.layout, self.calibration = layout, fit_layer(statistics, centre=self.centre)
        return self

    def compress(self, k: Any, v: Any) -> CompressedKV:
        """Packs `[B,Hkv,S,Dk]` and `[B,Hkv,S,Dv]` as the cache holds them after S tokens.

        Raises:
            MoecError: not calibrated, other dimensions than calibrated, or NaN.
        """
        layout, calibration = self._calibrated()
        originals = k, v
        k, v = self._pair(k, v)
        if (k.shape[1], k.shape[3], v.shape[3]) != (layout.num_kv_heads, layout.k_dim, layout.v_dim):
            raise MoecError(f"k {k.shape} and v {v.shape} have other heads or dimensions than calibrated")
        if np.isnan(k).any() or np.isnan(v).any():
            raise MoecError("NaN in k or v: the KV cache cannot hold it")
        rows = prepare_rows(layout, k.swapaxes(1, 2), v.swapaxes(1, 2), calibration).swapaxes(1, 2)
        count, first = layout.quantized_blocks(k.shape[2]), self.sink_tokens
        end = first + 64 * count
        blocks = rows[:, :, first:end].reshape(*k.shape[:2], count, 64, layout.row_dim)
        packed = quantize_block(layout, blocks, calibration.v_ref[:, None])
        return CompressedKV(
            packed, rows[:, :, :first].copy(), rows[:, :, end:].copy(), tuple(map(_restorer, originals))
        )

    def decompress(self, compressed: CompressedKV) -> tuple[Any, Any]:
        """What attention sees: k and v as given to `compress`, in their type and channel order.

        Raises:
            MoecError: not calibrated.
        """
        layout, calibration = self._calibrated()
        x, y = dequantize_block(layout, compressed.blocks, calibration.v_ref[:, None])
        middle = np.concatenate([x, y], -1).reshape(*x.shape[:2], -1, layout.row_dim)
        rows = np.concatenate([compressed.sinks.astype(F32), middle, compressed.recent.astype(F32)], 2)
        permuted = rows[..., : layout.k_dim] * calibration.k_ref[:, None] + calibration.k_mean[:, None]
        k = np.empty_like(permuted)
        order = np.broadcast_to(calibration.k_order[:, None].astype(np.int64), permuted.shape)
        np.put_along_axis(k, order, permuted, -1)
        v = hadamard(rows[..., layout.k_dim :], layout.v_group)
        return tuple(restore(part) for restore, part in zip(compressed._restore, (k, v), strict=True))

    def bits_per_element(self, tokens: int | None = None) -> float:
        """Bits per number with all metadata: of a block, or of the whole cache allocated for `tokens`.

        Raises:
            MoecError: not calibrated (the dimensions are not known before).
        """
        layout, _ = self._calibrated()
        if tokens is None:
            return layout.bits_per_element
        sized = KVLayout(
            layout.format, layout.num_kv_heads, layout.k_dim, layout.v_dim, tokens, promoted=layout.promoted,
            sink_tokens=layout.sink_tokens, recent_tokens=layout.recent_tokens,
        )  # fmt: skip
        return sized.bits_per_element_allocated

    def _new_layout(self, k: np.ndarray, v: np.ndarray) -> KVLayout:
        promoted = None
        if self.outlier_fraction is not None and self.format != "int8":
            promoted = min(k.shape[3], round_promoted(round(self.outlier_fraction * k.shape[3])))
        return KVLayout(
            self.format, k.shape[1], k.shape[3], v.shape[3], _NO_LIMIT, promoted=promoted,
            sink_tokens=self.sink_tokens, recent_tokens=self.recent_tokens,
        )  # fmt: skip

    def _calibrated(self) -> tuple[KVLayout, Calibration]:
        if self.layout is None or self.calibration is None:
            raise MoecError("The quantizer is not calibrated", hint="Call calibrate(k, v, q) first.")
        return self.layout, self.calibration

    @staticmethod
    def _pair(k: Any, v: Any) -> tuple[np.ndarray, np.ndarray]:
        k, v = to_numpy("k", k), to_numpy("v", v)
        if k.shape[:3] != v.shape[:3]:
            raise MoecError(f"k {k.shape} and v {v.shape} differ in more than their last dimension")
        return k, v


def to_numpy(name: str, x: Any) -> np.ndarray:
    """A NumPy or torch tensor of four dimensions as a float32 array.

    Raises:
        MoecError: another number of dimensions.
    """
    array = np.asarray(x.detach().cpu().float() if hasattr(x, "detach") else x).astype(F32)
    if array.ndim != 4:
        raise MoecError(f"{name} has {array.ndim} dimensions", hint="It is [B,H,S,D].")
    return array


def _restorer(original: Any) -> Callable[[np.ndarray], Any]:
    """Makes arrays into what `original` was: torch on its device, or NumPy, of its dtype."""
    if not hasattr(original, "detach"):
        dtype = np.asarray(original).dtype
        return lambda array: array.astype(dtype)
    import torch

    return lambda array: torch.from_numpy(array).to(original.device, original.dtype)
