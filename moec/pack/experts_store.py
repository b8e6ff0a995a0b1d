"""Write and map `experts.moex`: expert by expert, so that memory holds one expert at a time."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from moec.bundle.geometry import Geometry, MoELayer
from moec.bundle.writer import writing
from moec.checkpoint import Checkpoint
from moec.errors import MoecError
from moec.pack.blob_writer import BlobWriter, OnBytes, one_torch_thread
from moec.pack.quantizers import quantizer
from moec.reference.experts import BlobLayout, ExpertWeights, pack_expert
from moec.reference.store import StoreHeader

Importance = Mapping[str, np.ndarray]


def blob_layout(layer: MoELayer, weight_format: str) -> BlobLayout:
    """Where everything is in a blob of this layer."""
    return BlobLayout(weight_format, layer.hidden_size, layer.intermediate_size, layer.gated, layer.has_bias)


def plan_store(geometry: Geometry, weight_format: str) -> StoreHeader:
    """The header of the store, without reading any weight."""
    layers = [(m.layer, m.num_experts, blob_layout(m, weight_format).blob_bytes) for m in geometry.moe]
    return StoreHeader.plan(weight_format, 64, layers)


def store_bytes(geometry: Geometry, weight_format: str) -> int:
    """Bytes of all blobs: what the store takes on disk. The file looks larger: it has holes up to 2 MiB."""
    places = plan_store(geometry, weight_format).layers
    return sum(place.num_experts * place.blob_bytes for place in places)


def checked_bytes(header: StoreHeader) -> int:
    """Length of header and hash table: what the manifest's checksum covers."""
    return header.header_bytes + 8 * header.num_experts


def write_experts(
    path: Path,
    geometry: Geometry,
    checkpoint: Checkpoint,
    weight_format: str,
    on_bytes: OnBytes | None = None,
    importance: Importance | None = None,
) -> StoreHeader:
    """Quantize every expert into the store.

    Args:
        path: The file to make.
        geometry: Says where the expert weights are and how they lie there.
        checkpoint: Where they are read from, one expert at a time.
        weight_format: int4 | bf16.
        on_bytes: Called with the bytes of each blob that was written.
        importance: By parameter, f32 `[E,K]`; see `moec.reference.weights.quantize_int4`.

    Raises:
        MoecError: a full disk, or weights that cannot be packed (names layer and expert).
    """
    header = plan_store(geometry, weight_format)
    with writing(path, header.file_bytes), one_torch_thread(), path.open("wb") as file:
        with BlobWriter(file, on_bytes) as writer:
            for place, layer in zip(header.layers, geometry.moe, strict=True):
                layout, offset = blob_layout(layer, weight_format), place.offset
                for expert in range(layer.num_experts):
                    writer.write(offset, _pack(layout, layer, checkpoint, expert, importance or {}))
                    offset += place.blob_bytes
        file.truncate(header.file_bytes)
        file.seek(0)
        file.write(header.pack())
        file.write(np.array(writer.hashes, "<u8").tobytes())
    return header


def _pack(
    layout: BlobLayout, layer: MoELayer, checkpoint: Checkpoint, expert: int, importance: Importance
) -> np.ndarray:
    found = (importance.get(name) for name in (layer.gate_up, layer.down))
    counts = tuple(rows[expert] if rows is not None else None for rows in found)
    try:
        return pack_expert(layout, read_expert(checkpoint, layer, expert), quantizer("int4"), counts)
    except MoecError as error:
        where = f"layer {layer.layer}, expert {expert}"
        raise MoecError(error.what, where=where, hint=error.hint) from None


def read_expert(checkpoint: Checkpoint, layer: MoELayer, expert: int) -> ExpertWeights:
    """One expert in the canonical form: rows are output features, gate rows first.

    Returns:
        gate_up `[2I,H]` (`[I,H]` not gated), down `[H,I]` in the checkpoint's dtype, biases `[2I]`, `[H]`.
    """

    def part(name: str | None, gate_up: bool) -> np.ndarray | None:
        if name is None:
            return None
        value = checkpoint.expert(name, expert)
        value = value.T if layer.transposed and value.ndim == 2 else value
        return _split_pairs(value) if gate_up and layer.interleaved else value

    weights = part(layer.gate_up, True), part(layer.down, False)
    return ExpertWeights(*weights, part(layer.gate_up_bias, True), part(layer.down_bias, False))


def _split_pairs(rows: np.ndarray) -> np.ndarray:
    """gate0, up0, gate1, ... -> gate0, gate1, ..., up0, up1, ..."""
    return np.concatenate([rows[0::2], rows[1::2]])


@dataclass(frozen=True)
class ExpertStore:
    """A mapped store: `data` is the whole file, uint8, read-only."""

    path: Path
    header: StoreHeader
    data: np.ndarray

    def layer(self, layer: int) -> np.ndarray:
        """The blobs of a layer, int8 `[num_experts, blob_bytes]`, mapped.

        Raises:
            MoecError: the layer has no experts.
        """
        self.header.hash_index(layer)
        place = next(p for p in self.header.layers if p.layer == layer)
        return self.data[place.offset : place.end].view(np.int8).reshape(place.num_experts, place.blob_bytes)

    def hashes(self, layer: int) -> np.ndarray:
        """XXH64 of each blob of a layer, uint64 `[num_experts]`."""
        first = self.header.hash_index(layer)
        return self.header.hashes(self.data)[first : first + len(self.layer(layer))]


def open_experts(path: Path) -> ExpertStore:
    """Map a store.

    Raises:
        MoecError: missing, not a store, damaged header, or shorter than its header says.
    """
    try:
        data = np.memmap(path, np.uint8, "r")
    except (OSError, ValueError) as error:
        raise MoecError(f"The expert store cannot be read: {error}", where=str(path)) from None
    header = StoreHeader.parse(memoryview(data[: 1 << 20]), str(path))
    if header.file_bytes != data.size:
        what = f"{path.name} is damaged: it has {data.size} bytes, its header says {header.file_bytes}"
        raise MoecError(what, where=str(path))
    return ExpertStore(path, header, data)
