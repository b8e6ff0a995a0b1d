"""Marks graphs whose rows do not depend, bit for bit, on how many rows a run has.

The operators of libmoec_cpu are made so. ONNX Runtime's matrix products are not: which kernel computes a row
depends on the number of rows. The runtime pads runs of graphs without the mark to an even number.
"""

from __future__ import annotations

import onnx_ir as ir

from moec.rewrite.context import RewriteContext

KEY = "moec.independent_rows"
_PRODUCTS = {"MatMul", "Gemm", "MatMulNBits", "MatMulInteger", "Einsum", "Conv"}


def mark_independent(model: ir.Model, context: RewriteContext, notes: list[str]) -> int:
    """Sets the mark in the model's metadata; returns 1 if it applies."""
    if any(node.op_type in _PRODUCTS for node in model.graph.all_nodes()):
        return 0
    model.metadata_props[KEY] = "1"
    return 1
