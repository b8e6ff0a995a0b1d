"""Published and naive 2-bit caches as yardsticks: what they store, what a query sees, and attention over it.

Written from the papers; nothing of their code is used. A scheme says how many of the oldest tokens a query
sees quantized, so that attention is that of decoding token by token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

F32 = np.float32
QUERIES = 64


def quantize_min_max(x: np.ndarray, axis: int) -> tuple[np.ndarray, int]:
    """2-bit codes between the minimum and maximum of groups along `axis`, scale and minimum in fp16.

    Args:
        x: float32.
        axis: The axis that a group runs along.

    Returns:
        The values as stored, float32, and the bytes that codes, scales and minima take.
    """
    low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
    scale, low = ((high - low) / 3).astype(np.float16), low.astype(np.float16)
    step = np.maximum(scale.astype(F32), 1e-12)
    codes = np.clip(np.rint((x - low.astype(F32)) / step), 0, 3)
    packed = (codes.reshape(-1, 4) @ np.array([1, 4, 16, 64], F32)).astype(np.uint8)
    return codes * scale.astype(F32) + low.astype(F32), packed.nbytes + scale.nbytes + low.nbytes


@dataclass
class Stored:
    """A layer's cache: K and V as dequantized `[Hkv,n,D]`, the tokens that are complete, and their bytes."""

    key: np.ndarray
    value: np.ndarray
    key_bytes: int
    value_bytes: int

    @property
    def bits(self) -> float:
        """Bits a number, of K and V together, metadata included."""
        return 4.0 * (self.key_bytes / self.key.size + self.value_bytes / self.value.size)


class Kivi2:
    """KIVI-2 (arXiv 2402.02750): K per channel over 32 tokens, V per token over 32 channels, 128 fp16."""

    name = "KIVI-2"
    group, residual = 32, 128

    def store(self, layer: int, key: np.ndarray, value: np.ndarray) -> Stored:
        """Quantizes the complete groups of K `[Hkv,S,Dk]` and all V `[Hkv,S,Dv]`."""
        heads, tokens, dk = key.shape
        groups = tokens // self.group
        k, k_bytes = quantize_min_max(
            key[:, : groups * self.group].reshape(heads, groups, self.group, dk), axis=2
        )
        v, v_bytes = quantize_min_max(value.reshape(heads, tokens, -1, self.group), axis=3)
        return Stored(k.reshape(heads, -1, dk), v.reshape(value.shape), k_bytes, v_bytes)

    def visible(self, position: int) -> tuple[int, int]:
        """Oldest tokens whose K and V the query at a position sees quantized.

        K is flushed when 128 tokens have gathered, V leaves a sliding window of 128 token by token.
        """
        return position // self.residual * self.residual, max(0, position - self.residual)


class NaiveOutliers:
    """5 % of the channels in fp16, the others 2 bits between minimum and maximum; no sinks, no window.

    K per channel over 64 tokens, V per token over all channels that are not outliers. Outlier channels are
    those of the largest mean magnitude, by KV head, on calibration text.
    """

    name = "5 % fp16 outliers + 2-bit min/max"
    block = 64

    def __init__(self, magnitudes: dict[int, tuple[np.ndarray, np.ndarray]], share: float = 0.05) -> None:
        """magnitudes: layer -> mean |K| `[Hkv,Dk]` and |V| `[Hkv,Dv]`."""
        self._others = {layer: tuple(_others(m, share) for m in pair) for layer, pair in magnitudes.items()}

    def store(self, layer: int, key: np.ndarray, value: np.ndarray) -> Stored:
        """Quantizes the complete blocks of K `[Hkv,S,Dk]` and all V `[Hkv,S,Dv]`."""
        others_k, others_v = self._others[layer]
        heads, tokens, _ = key.shape
        count = tokens // self.block * self.block
        stored = [key[:, :count].astype(np.float16).astype(F32), value.astype(np.float16).astype(F32)]
        sizes = []
        for x, others, axis in zip(stored, (others_k, others_v), (2, 3), strict=True):
            picked = np.take_along_axis(x, others[:, None], axis=2)
            blocks = picked.reshape(heads, -1, self.block if axis == 2 else 1, others.shape[1])
            y, nbytes = quantize_min_max(blocks, axis)
            np.put_along_axis(x, others[:, None], y.reshape(picked.shape), axis=2)
            sizes.append(nbytes + 2 * (x.size - picked.size))
        return Stored(*stored, *sizes)

    def visible(self, position: int) -> tuple[int, int]:
        """Oldest tokens whose K and V the query at a position sees quantized."""
        return position // self.block * self.block, position


def _others(magnitude: np.ndarray, share: float) -> np.ndarray:
    """Channels `[Hkv,n]` that are not outliers, n a multiple of 4."""
    outliers = -(-int(np.ceil(share * magnitude.shape[1])) // 4) * 4
    return np.sort(np.argsort(-magnitude, axis=1, kind="stable")[:, outliers:], axis=1)


def attend(
    scheme: Kivi2 | NaiveOutliers,
    layer: int,
    scale: float,
    query: np.ndarray,
    key: np.ndarray,
    value: np.ndarray,
) -> tuple[np.ndarray, Stored]:
    """Attention as in decoding: `[Hq,S,Dk]`, `[Hkv,S,Dk]`, `[Hkv,S,Dv]` -> float32 `[Hq,S,Dv]`."""
    stored = scheme.store(layer, key, value)
    heads, tokens, _ = key.shape
    q = torch.from_numpy(query * F32(scale)).reshape(heads, -1, tokens, query.shape[2])
    exact = [torch.from_numpy(x.astype(np.float16).astype(F32)) for x in (key, value)]
    quantized = [torch.from_numpy(x) for x in (stored.key, stored.value)]
    runs = [
        _run(scheme, q[:, :, a : min(a + QUERIES, tokens)], a, exact, quantized)
        for a in range(0, tokens, QUERIES)
    ]
    return torch.cat(runs, 2).reshape(query.shape[0], tokens, -1).numpy(), stored


def _run(
    scheme: Kivi2 | NaiveOutliers,
    q: torch.Tensor,
    start: int,
    exact: list[torch.Tensor],
    quantized: list[torch.Tensor],
) -> torch.Tensor:
    heads, group, count, _ = q.shape
    end = start + count
    seen = torch.tensor([scheme.visible(n) for n in range(start, end)])
    assert (seen[:, 0] == seen[0, 0]).all(), "K is flushed between runs of queries only"
    flushed = int(seen[0, 0])
    keys = torch.cat([quantized[0][:, :flushed], exact[0][:, flushed:end]], 1)
    logits = q.reshape(heads, group * count, -1) @ keys.transpose(1, 2)
    token = torch.arange(end)
    future = token[None] > torch.arange(start, end)[:, None]
    p = torch.softmax(logits.reshape(heads, group, count, end).masked_fill(future, -1e30), -1)
    old = token[None] < seen[:, 1:]
    parts = [(p * old, quantized[1]), (p * ~old, exact[1])]
    outs = [(x.reshape(heads, group * count, end) @ v[:, :end]) for x, v in parts]
    return (outs[0] + outs[1]).reshape(heads, group, count, -1)
