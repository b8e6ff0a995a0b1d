"""Marks the parameters that no pass took (norms, biases, routers) as fp32 tensors."""

from __future__ import annotations

import onnx_ir as ir

from moec.rewrite.context import RewriteContext
from moec.rewrite.parameters import TRANSFORM, is_parameter


def lower_stored(model: ir.Model, context: RewriteContext, notes: list[str]) -> int:
    """Returns how many parameters are stored as fp32."""
    rest = [v for v in model.graph.initializers.values() if is_parameter(v)]
    for value in rest:
        value.metadata_props[TRANSFORM] = "f32"
    return len(rest)
