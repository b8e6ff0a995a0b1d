"""Where in a bundle's files the bytes of each engine input are."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from moec.compile.stored import StoredTensor, stored_tensors
from moec.reference.store import StoreHeader

_HEADER = 1 << 22  # far more than the header of any model
WEIGHTS, STORE, CALIBRATION = "weights.safetensors", "experts.moex", "calibration.safetensors"


@dataclass(frozen=True)
class Place:
    """Bytes `[offset, offset + nbytes)` of a file of the bundle."""

    file: str
    offset: int
    nbytes: int


@dataclass(frozen=True)
class BundlePlaces:
    """The tensors of a bundle folder's files, by the names that the graph uses.

    Attributes:
        weights: Dense weights, by the names in weights.safetensors.
        calibration: `kv.{layer}.k_mean` and so on.
        store: `moe.{layer}.experts`.
    """

    weights: dict[str, StoredTensor]
    calibration: dict[str, Place]
    store: dict[str, Place]


def places_in(folder: Path) -> BundlePlaces:
    """Read the headers of a bundle's weight files.

    Raises:
        MoecError: a file that is missing or damaged.
    """
    calibration = stored_tensors(folder / CALIBRATION)
    with (folder / STORE).open("rb") as file:
        header = StoreHeader.parse(file.read(_HEADER))
    return BundlePlaces(
        weights=stored_tensors(folder / WEIGHTS),
        calibration={name: Place(CALIBRATION, t.offset, t.nbytes) for name, t in calibration.items()},
        store={
            f"moe.{entry.layer}.experts": Place(STORE, entry.offset, entry.num_experts * entry.blob_bytes)
            for entry in header.layers
        },
    )
