"""Graphs of a checkpoint that stock ONNX Runtime can run, with logits of every token."""

from __future__ import annotations

from pathlib import Path

from moec.checkpoint import open_checkpoint
from moec.frontend import capture, save_exported
from moec.rewrite.graph_edit import all_logits, with_functions
from tests.helpers.built import build_graph
from tests.parity.stock import StockSession


def exported_session(checkpoint: Path, folder: Path, context: int) -> StockSession:
    """The exported graph: standard operators only."""
    ckpt = open_checkpoint(checkpoint)
    captured = capture(ckpt, 1, context)
    all_logits(captured.model)
    save_exported(captured, ckpt, folder / "exported.onnx")
    return StockSession(folder / "exported.onnx")


def function_session(checkpoint: Path, folder: Path, context: int) -> StockSession:
    """The rewritten graph, fp32 cache and bf16 weights, every moec operator by its function body."""
    built = build_graph(open_checkpoint(checkpoint), folder, batch=1, context=context)
    with_functions(all_logits(built.model))
    return StockSession(built.save("functions.onnx"), built.constants)
