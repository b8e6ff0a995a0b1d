"""The binding table names every input's source and every output's alias."""

from __future__ import annotations

import onnx_ir as ir
import pytest

from moec.bundle.bindings import bindings_of
from moec.bundle.manifest import Binding
from moec.errors import MoecError


def value(name: str, dtype: ir.DataType, *shape: int | str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def graph(inputs, outputs) -> ir.Graph:
    return ir.Graph(inputs, outputs, nodes=[])


def ids() -> ir.Value:
    return value("input_ids", ir.DataType.INT32, "b", "S")


def ring(suffix: str = "") -> ir.Value:
    return value(f"kv.3.ring{suffix}", ir.DataType.FLOAT16, 4, 2, 144, 128)


def test_sources_types_shapes_and_aliases():
    order = value("kv.3.k_order", ir.DataType.INT32, 2, 64)
    logits = value("logits", ir.DataType.FLOAT, "b", 512)
    store = value("moe.3.experts", ir.DataType.INT8, 8, 4096)
    inputs, outputs = bindings_of(graph([ids(), ring(), order, store], [logits, ring(".out")]))
    assert inputs == (
        Binding("input_ids", "int32", ("b", "S"), "request"),
        Binding("kv.3.ring", "float16", (4, 2, 144, 128), "cache"),
        Binding("kv.3.k_order", "int32", (2, 64), "calibration"),
        Binding("moe.3.experts", "int8", (8, 4096), "store"),
    )
    assert outputs == (
        Binding("logits", "float32", ("b", 512), "result"),
        Binding("kv.3.ring.out", "float16", (4, 2, 144, 128), "cache", "kv.3.ring"),
    )


def test_foreign_inputs_and_outputs_are_refused():
    with pytest.raises(MoecError, match="attention_mask"):
        bindings_of(graph([value("attention_mask", ir.DataType.INT32, "b")], []))
    with pytest.raises(MoecError, match=r"kv\.3\.ring\.out"):
        bindings_of(graph([ids()], [ring(".out")]))
    with pytest.raises(MoecError, match="no type or shape"):
        bindings_of(graph([ir.Value(name="lengths")], []))
