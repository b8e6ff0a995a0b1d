"""`--plan-only`: the places of all weights, without the weights.

The engine stage reads where tensors are from the headers of weights.safetensors and experts.moex. A plan has
those headers while it is built, and no such file afterwards: nothing can take it for a model.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from moec.builder.options import BuildOptions
from moec.bundle.geometry import Geometry
from moec.bundle.writer import write_bytes
from moec.checkpoint import Checkpoint
from moec.compile.places import STORE, WEIGHTS
from moec.pack.experts_store import plan_store
from moec.pack.weights import TensorPlan, plan_weights
from moec.reference.store import StoreHeader

Places = dict[str, tuple[int, int]]


def write_plan(
    folder: Path,
    plans: Sequence[TensorPlan],
    checkpoint: Checkpoint,
    geometry: Geometry,
    options: BuildOptions,
) -> tuple[Places, StoreHeader]:
    """Write the headers that the packed files would have.

    Returns:
        Tensor name -> (offset, length) in weights.safetensors, and the header of the store.
    """
    planned, header = plan_weights(plans, checkpoint.shape), plan_store(geometry, options.experts)
    write_bytes(folder / WEIGHTS, planned.header)
    write_bytes(folder / STORE, header.pack())
    return planned.places(), header


def remove_plan(folder: Path) -> None:
    """Remove what `write_plan` wrote."""
    for name in (WEIGHTS, STORE):
        (folder / name).unlink()
