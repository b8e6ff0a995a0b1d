"""Experts in NumPy: the blob that holds one expert, and the MLP that it describes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import ml_dtypes
import numpy as np

from moec.errors import MoecError
from moec.reference.weights import GROUP_SIZE, dequantize_int4, num_groups, quantize_int4

F32, F64 = np.float32, np.float64
Quantizer = Callable[..., tuple[np.ndarray, np.ndarray]]
WEIGHT_FORMATS = ("int4", "bf16")
ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")
SECTION_ALIGN, BLOB_ALIGN = 128, 4096


@dataclass(frozen=True)
class BlobSection:
    """A part of a blob: elements of `dtype` (a NumPy or ml_dtypes type) in `shape` from byte `offset` on."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: np.dtype

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def end(self) -> int:
        return self.offset + self.nbytes


@dataclass(frozen=True)
class BlobLayout:
    """Where everything is in an expert's blob: identical bytes on disk, in memory and in a device slot.

    Args:
        weight_format: int4 | bf16.
        hidden_size, intermediate_size: H and I.
        gated: gate_up has 2I rows (I gate rows, then I up rows), else I.
        has_bias: float32 biases follow the weights.
        group_size: 64.

    Raises:
        MoecError: a format that does not exist.
    """

    weight_format: str
    hidden_size: int
    intermediate_size: int
    gated: bool = True
    has_bias: bool = False
    group_size: int = GROUP_SIZE

    def __post_init__(self) -> None:
        if self.weight_format not in WEIGHT_FORMATS or self.group_size != GROUP_SIZE:
            raise MoecError(f"unknown expert format {self.weight_format} with groups of {self.group_size}")

    @property
    def gate_up_rows(self) -> int:
        return (1 + bool(self.gated)) * self.intermediate_size

    def _matrix(self, name: str, rows: int, columns: int) -> list[tuple[str, tuple[int, ...], np.dtype]]:
        if self.weight_format == "bf16":
            return [(name, (rows, columns), np.dtype(ml_dtypes.bfloat16))]
        groups = num_groups(columns)
        codes = (f"{name}_codes", (rows, groups * GROUP_SIZE // 2), np.dtype(np.uint8))
        return [codes, (f"{name}_scales", (rows, groups), np.dtype(np.float16))]

    @cached_property
    def sections(self) -> dict[str, BlobSection]:
        """Parts in memory order, each 128-byte aligned."""
        parts = self._matrix("gate_up", self.gate_up_rows, self.hidden_size)
        parts += self._matrix("down", self.hidden_size, self.intermediate_size)
        if self.has_bias:
            parts.append(("gate_up_bias", (self.gate_up_rows,), np.dtype(F32)))
            parts.append(("down_bias", (self.hidden_size,), np.dtype(F32)))
        result, offset = {}, 0
        for name, shape, dtype in parts:
            result[name] = BlobSection(name, offset, shape, dtype)
            offset = -(-result[name].end // SECTION_ALIGN) * SECTION_ALIGN
        return result

    @property
    def offsets(self) -> dict[str, int]:
        """Byte offset of each section."""
        return {name: section.offset for name, section in self.sections.items()}

    @property
    def blob_bytes(self) -> int:
        """Bytes of a blob, a multiple of 4096."""
        end = list(self.sections.values())[-1].end
        return -(-end // BLOB_ALIGN) * BLOB_ALIGN


@dataclass(frozen=True)
class ExpertWeights:
    """float32 weights of one expert: gate_up `[R,H]`, down `[H,I]`, biases `[R]`, `[H]` or None."""

    gate_up: np.ndarray
    down: np.ndarray
    gate_up_bias: np.ndarray | None = None
    down_bias: np.ndarray | None = None


def _encode(
    layout: BlobLayout, name: str, weight: np.ndarray, importance: np.ndarray | None, quantize: Quantizer
) -> dict[str, np.ndarray]:
    if layout.weight_format == "bf16":
        return {name: np.asarray(weight).astype(ml_dtypes.bfloat16)}
    codes, scales = quantize(weight) if importance is None else quantize(weight, importance)
    return {f"{name}_codes": codes, f"{name}_scales": scales}


def pack_expert(
    layout: BlobLayout,
    weights: ExpertWeights,
    quantize: Quantizer = quantize_int4,
    importance: tuple[np.ndarray | None, np.ndarray | None] = (None, None),
) -> np.ndarray:
    """Quantizes one expert into its blob.

    Args:
        layout: Format and sizes.
        weights: Any float type.
        quantize: A function with the results of `quantize_int4`, for instance the native one.
        importance: Of the inputs of gate_up, f32 `[H]`, and of down, f32 `[I]`; see `quantize_int4`.

    Returns:
        uint8 `[blob_bytes]`, padding zero.

    Raises:
        MoecError: a shape that is not the layout's.
    """
    parts = _encode(layout, "gate_up", weights.gate_up, importance[0], quantize)
    parts |= _encode(layout, "down", weights.down, importance[1], quantize)
    if layout.has_bias:
        parts["gate_up_bias"] = np.asarray(weights.gate_up_bias, F32)
        parts["down_bias"] = np.asarray(weights.down_bias, F32)
    blob = np.zeros(layout.blob_bytes, np.uint8)
    for name, section in layout.sections.items():
        if parts[name].shape != section.shape:
            raise MoecError(f"expert {name} has shape {parts[name].shape}, expected {section.shape}")
        blob[section.offset : section.end] = np.ascontiguousarray(parts[name]).view(np.uint8).reshape(-1)
    return blob


def blob_section(layout: BlobLayout, blobs: np.ndarray, name: str) -> np.ndarray:
    """A section of blobs (uint8 or int8 `[..., blob_bytes]`) in its own type: `[..., *section.shape]`."""
    section = layout.sections[name]
    part = np.ascontiguousarray(np.asarray(blobs).view(np.uint8)[..., section.offset : section.end])
    return part.view(section.dtype).reshape(*part.shape[:-1], *section.shape)


def _decode(layout: BlobLayout, blobs: np.ndarray, name: str, columns: int) -> np.ndarray:
    if layout.weight_format == "bf16":
        return blob_section(layout, blobs, name).astype(F32)
    codes, scales = (blob_section(layout, blobs, f"{name}_{part}") for part in ("codes", "scales"))
    return dequantize_int4(codes, scales, columns)


def unpack_expert(layout: BlobLayout, blob: np.ndarray) -> ExpertWeights:
    """Dequantizes a blob, uint8 or int8 `[blob_bytes]`."""
    biases = (None, None)
    if layout.has_bias:
        biases = tuple(blob_section(layout, blob, name) for name in ("gate_up_bias", "down_bias"))
    gate_up = _decode(layout, blob, "gate_up", layout.hidden_size)
    return ExpertWeights(gate_up, _decode(layout, blob, "down", layout.intermediate_size), *biases)


def round_activations(x: np.ndarray) -> np.ndarray:
    """What int8 kernels make of activations: per 64 columns, scale max|x|/(127*128), rounded to nearest even.

    The 15-bit codes are two int8 (128*high + low): with one int8 an expert's output is off by 1.4 %.

    Args:
        x: float32 `[..., K]`.

    Returns:
        float32 `[..., K]`, code*scale.
    """
    x = np.asarray(x, F32)
    columns = x.shape[-1]
    padding = [(0, 0)] * (x.ndim - 1) + [(0, num_groups(columns) * GROUP_SIZE - columns)]
    groups = np.pad(x, padding).reshape(*x.shape[:-1], -1, GROUP_SIZE)
    scale = np.abs(groups).max(axis=-1, keepdims=True) / F32(127 * 128)
    codes = np.clip(np.rint(groups / np.where(scale == 0, F32(1), scale)), F32(-16256), F32(16256))
    return (codes * scale).reshape(*x.shape[:-1], -1)[..., :columns]


def _sigmoid(x: np.ndarray) -> np.ndarray:
    return 0.5 * (1.0 + np.tanh(0.5 * x))


_erf = np.vectorize(math.erf, otypes=[F64])


def activate(
    name: str, gate: np.ndarray, up: np.ndarray | None, alpha: float = 1.0, limit: float = 0.0
) -> np.ndarray:
    """act(gate) * up, in float64.

    Args:
        name: silu | gelu (erf) | gelu_tanh | relu2 (squared relu) | swiglu_oai (clamped, GPT-OSS).
        gate, up: `[..., I]`; up is None for experts that are not gated.
        alpha: Slope of swiglu_oai's sigmoid.
        limit: Clamp of swiglu_oai.

    Raises:
        MoecError: unknown name.
    """
    gate = np.asarray(gate, F64)
    if name == "swiglu_oai":
        gate = np.minimum(gate, limit)
        return (np.clip(np.asarray(up, F64), -limit, limit) + 1.0) * gate * _sigmoid(alpha * gate)
    if name == "silu":
        value = gate * _sigmoid(gate)
    elif name == "gelu":
        value = 0.5 * gate * (1.0 + _erf(gate / math.sqrt(2.0)))
    elif name == "gelu_tanh":
        value = 0.5 * gate * (1.0 + np.tanh(math.sqrt(2.0 / math.pi) * (gate + 0.044715 * gate**3)))
    elif name == "relu2":
        value = np.maximum(gate, 0.0) ** 2
    else:
        raise MoecError(f"unknown activation {name!r}, known are {', '.join(ACTIVATIONS)}")
    return value if up is None else value * np.asarray(up, F64)


def _linear(x: np.ndarray, weight: np.ndarray, bias: np.ndarray | None, compute: str) -> np.ndarray:
    x = round_activations(x) if compute == "int8" else x
    y = np.asarray(x, F64) @ weight.astype(F64).T
    return y if bias is None else y + bias.astype(F64)


def run_expert(
    layout: BlobLayout,
    weights: ExpertWeights,
    x: np.ndarray,
    activation: str,
    alpha: float = 1.0,
    limit: float = 0.0,
    compute: str = "fp32",
) -> np.ndarray:
    """down(act(gate_up(x))): float32 `[T,H]` -> float32 `[T,H]`, accumulated in float64.

    Args:
        layout: Tells whether the expert is gated.
        weights: From `unpack_expert`.
        x: float32 `[T,H]`.
        activation, alpha, limit: see `activate`.
        compute: fp32, or int8: inputs of both products are rounded as in `round_activations` (int4 weights
            only; bf16 weights are always multiplied in floating point).
    """
    compute = compute if layout.weight_format == "int4" else "fp32"
    h = _linear(x, weights.gate_up, weights.gate_up_bias, compute)
    size = layout.intermediate_size
    gate, up = (h[..., :size], h[..., size:]) if layout.gated else (h, None)
    h = activate(activation, gate, up, alpha, limit).astype(F32)
    return _linear(h, weights.down, weights.down_bias, compute).astype(F32)
