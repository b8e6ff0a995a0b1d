"""Builds a graph and its packed weights in a folder, without the builder: capture, rewrite, pack."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from moec.bundle.geometry import Geometry
from moec.calibrate.run import neutral
from moec.checkpoint import Checkpoint
from moec.frontend import Captured, capture
from moec.pack.experts_store import open_experts, write_experts
from moec.pack.graph_weights import bind_weights, plans_for
from moec.pack.weights import write_weights
from moec.reference.kv_layout import KVLayout
from moec.rewrite import PASSES, RewriteContext, run
from moec.rewrite.pipeline import Pass, PassReport


@dataclass
class Built:
    """A runnable graph: `model` bound to the files in `folder`, and its constant inputs."""

    folder: Path
    model: ir.Model
    geometry: Geometry
    constants: dict[str, np.ndarray]
    reports: list[PassReport]

    def save(self, name: str) -> Path:
        """Writes the graph into the folder."""
        path = self.folder / name
        path.write_bytes(ir.to_proto(self.model).SerializeToString())
        return path


def build_graph(
    ckpt: Checkpoint, folder: Path, *, kv: str = "fp32", weights: str = "bf16", experts: str = "bf16",
    compute: str = "fp32", batch: int = 2, context: int = 64,
    passes: tuple[Pass, ...] = PASSES, captured: Captured | None = None,
) -> Built:  # fmt: skip
    """Everything from the checkpoint to a graph that a session can load from `folder`."""
    captured = captured or capture(ckpt, batch, context)
    geometry, model = captured.geometry, captured.model.clone()
    layouts = {
        a.layer: KVLayout(kv, a.num_kv_heads, a.k_dim, a.v_dim, context, a.window) for a in geometry.attention
    }
    reports = run(model, RewriteContext(geometry, layouts, weights, experts, compute), passes=passes)
    folder.mkdir(parents=True, exist_ok=True)
    plans = plans_for(model, ckpt.shape)
    places = write_weights(folder / "weights.safetensors", plans, ckpt)
    bind_weights(model, places)
    write_experts(folder / "experts.moex", geometry, ckpt, experts)
    store = open_experts(folder / "experts.moex")
    constants = neutral(layouts) | {f"moe.{m.layer}.experts": store.layer(m.layer) for m in geometry.moe}
    return Built(folder, model, geometry, constants, reports)
