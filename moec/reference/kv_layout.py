"""Where every byte of a layer's KV cache is: `KVLayout` (format MKV2, docs/kv-cache.md)."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import prod

import numpy as np

from moec.errors import MoecError

BLOCK_TOKENS = 64
QUANTIZED_FORMATS = ("mkv2", "mkv2_lean", "k4v2", "int8")
FLOAT_FORMATS = ("fp16", "fp32")
FORMATS = QUANTIZED_FORMATS + FLOAT_FORMATS

_SECTION_ALIGN, _BLOCK_ALIGN = 16, 128
_PROMOTED_DIVISOR = {"mkv2": 4, "mkv2_lean": 8, "k4v2": 1}


def align_up(value: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is >= value."""
    return -(-value // multiple) * multiple


def promoted_channels(format: str, k_dim: int) -> int:
    """Number of K channels that hold two more bits: k_dim/4 (mkv2), k_dim/8 (lean), all (k4v2) or none.

    From 12 on rounded half up to a multiple of 16 (a tensor-core tile), below up to a multiple of 4 (a byte).
    """
    if format not in _PROMOTED_DIVISOR:
        return 0
    return k_dim if format == "k4v2" else round_promoted(k_dim // _PROMOTED_DIVISOR[format])


def round_promoted(wanted: int) -> int:
    """The number of promoted channels that a layout has for about `wanted` of them."""
    return (wanted + 8) // 16 * 16 if wanted >= 12 else align_up(wanted, 4)


def value_group(v_dim: int) -> int:
    """Size of a V group (rotation and scale): the largest power of two <= 64 that divides v_dim."""
    return min(BLOCK_TOKENS, v_dim & -v_dim)


@dataclass(frozen=True)
class Section:
    """A part of a block: `shape` of `dtype` elements from byte `offset` on."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: str

    @property
    def nbytes(self) -> int:
        return prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class KVLayout:
    """Shapes and offsets of the cache of one attention layer; everything is derived from these fields.

    Args:
        format: mkv2 | mkv2_lean | k4v2 | int8 (blocks and an fp16 ring) | fp16 | fp32 (a ring of the whole
            context).
        num_kv_heads, k_dim, v_dim: Geometry of the layer; both dims are multiples of 4.
        context: Most tokens a slot can hold.
        window: 0, or the sliding window: then the cache is a ring only, whatever the format.
        block_tokens: 64.
        promoted: K channels with 4 bits; None takes the format's default.
        sink_tokens, recent_tokens: First and newest tokens that stay in fp16.
        rollback_tokens: How far `lengths` may be set back exactly.

    Raises:
        MoecError: a value that no layout exists for.
    """

    format: str
    num_kv_heads: int
    k_dim: int
    v_dim: int
    context: int
    window: int = 0
    block_tokens: int = BLOCK_TOKENS
    promoted: int | None = None
    sink_tokens: int = 16
    recent_tokens: int = 64
    rollback_tokens: int = 0

    def __post_init__(self) -> None:
        if self.promoted is None:
            object.__setattr__(self, "promoted", promoted_channels(self.format, self.k_dim))
        for broken, what in self._checks():
            if broken:
                where = f"format {self.format}, head_dim {self.k_dim}/{self.v_dim}"
                raise MoecError(f"KV cache: {what}", where=where)

    def _checks(self) -> list[tuple[bool, str]]:
        smallest_size = min(self.window, self.sink_tokens, self.recent_tokens, self.rollback_tokens)
        smallest_dim = min(self.num_kv_heads, self.k_dim, self.v_dim, self.context)
        bad_promoted = not 0 <= self.promoted <= self.k_dim or self.promoted % 4 != 0
        bad_promoted |= self.format == "int8" and self.promoted != 0
        return [
            (self.format not in FORMATS, f"unknown format {self.format!r}, known are {', '.join(FORMATS)}"),
            (self.block_tokens != BLOCK_TOKENS, f"block_tokens must be {BLOCK_TOKENS}"),
            (smallest_dim < 1, "a dimension is not positive"),
            (self.k_dim % 4 != 0 or self.v_dim % 4 != 0, "head dimensions must be multiples of 4"),
            (smallest_size < 0, "a size is negative"),
            (bad_promoted, "promoted must be a multiple of 4, and 0 for int8"),
        ]

    @property
    def quantized(self) -> bool:
        """True where the layer has blocks: a quantized format on a layer without a window."""
        return self.format in QUANTIZED_FORMATS and self.window == 0

    @property
    def v_group(self) -> int:
        return value_group(self.v_dim)

    @property
    def num_v_groups(self) -> int:
        return self.v_dim // self.v_group

    @property
    def row_dim(self) -> int:
        """Elements of a ring row: K part, then V part."""
        return self.k_dim + self.v_dim

    @property
    def ring_dtype(self) -> np.dtype:
        return np.dtype(np.float32 if self.format == "fp32" else np.float16)

    @property
    def ring_period(self) -> int:
        """Rows that are reused in turn (after the sinks of a quantized layer)."""
        if self.quantized:
            return self.recent_tokens + self.block_tokens + self.rollback_tokens
        return min(self.context, self.window + self.rollback_tokens) if self.window else self.context

    @property
    def ring_sinks(self) -> int:
        """Rows at the front that are never reused."""
        return self.sink_tokens if self.quantized else 0

    @property
    def ring_rows(self) -> int:
        return self.ring_sinks + self.ring_period

    def ring_row(self, token: int | np.ndarray) -> int | np.ndarray:
        """Row of the ring that token (0-based position) is written to."""
        sinks, period = self.ring_sinks, self.ring_period
        if isinstance(token, np.ndarray):
            return np.where(token < sinks, token, sinks + (token - sinks) % period)
        return token if token < sinks else sinks + (token - sinks) % period

    def ring_shape(self, batch: int) -> tuple[int, int, int, int]:
        """`[B, Hkv, rows, Dk+Dv]` of dtype `ring_dtype`."""
        return batch, self.num_kv_heads, self.ring_rows, self.row_dim

    def quantized_blocks(self, length: int) -> int:
        """nq(length): blocks quantized when `length` tokens are cached; 0 for layers without blocks."""
        if not self.quantized:
            return 0
        return max(0, length - self.sink_tokens - self.recent_tokens) // self.block_tokens

    @property
    def num_blocks(self) -> int:
        return max(1, self.quantized_blocks(self.context))

    @cached_property
    def sections(self) -> dict[str, Section]:
        """Parts of a block in memory order; empty for layers without blocks."""
        if not self.quantized:
            return {}
        result, offset = {}, 0
        for name, shape, dtype in self._parts():
            result[name] = Section(name, offset, shape, dtype)
            offset = align_up(result[name].end, _SECTION_ALIGN)
        return result

    def _parts(self) -> list[tuple[str, tuple[int, ...], str]]:
        tokens, dk, dv, groups = self.block_tokens, self.k_dim, self.v_dim, self.num_v_groups
        if self.format == "int8":
            return [
                ("k_codes", (tokens, dk), "int8"),
                ("k_scale", (dk,), "e4m3"),
                ("v_codes", (tokens, dv), "int8"),
                ("v_scale", (tokens, groups), "e4m3"),
            ]
        return [
            ("k_lo", (tokens, dk // 4), "uint8"),
            ("k_hi", (tokens, self.promoted // 4), "uint8"),
            ("k_scale", (dk,), "e4m3"),
            ("k_zero", (dk,), "int8"),
            ("v_codes", (tokens, dv // 4), "uint8"),
            ("v_scale", (tokens, groups), "e4m3"),
            ("v_zero", (tokens, groups), "e4m3"),
        ]

    @property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each section of a block."""
        return {name: section.offset for name, section in self.sections.items()}

    @property
    def block_bytes(self) -> int:
        """Bytes of one block of one KV head; 1 for layers without blocks (their dummy is int8 [1,1,1,1])."""
        if not self.quantized:
            return 1
        return align_up(max(section.end for section in self.sections.values()), _BLOCK_ALIGN)

    def blocks_shape(self, batch: int) -> tuple[int, int, int, int]:
        """`[B, Hkv, NB, block_bytes]` int8, or `[1,1,1,1]` for layers without blocks."""
        if not self.quantized:
            return 1, 1, 1, 1
        return batch, self.num_kv_heads, self.num_blocks, self.block_bytes

    def bytes_allocated(self, batch: int) -> int:
        """Bytes of the layer's cache for `batch` slots: blocks and ring, as allocated."""
        return prod(self.blocks_shape(batch)) + prod(self.ring_shape(batch)) * self.ring_dtype.itemsize

    @property
    def bits_per_element(self) -> float:
        """Bits per cached number in a block with all metadata and padding (no blocks: of the ring's type)."""
        if not self.quantized:
            return 8.0 * self.ring_dtype.itemsize
        return 8.0 * self.block_bytes / (self.block_tokens * self.row_dim)

    @property
    def bits_per_element_allocated(self) -> float:
        """Bits per number over the whole allocation (ring and sinks too), for a full context."""
        return 8.0 * self.bytes_allocated(1) / (self.num_kv_heads * self.context * self.row_dim)
