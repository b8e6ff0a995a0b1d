"""Token embeddings -> 8-bit codes dequantized at the rows that are read (or bf16)."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from moec.rewrite.context import OTHER, RewriteContext, Rule
from moec.rewrite.parameters import GROUP, TRANSFORM, as_bf16, is_parameter, quantized


class EmbeddingRule(Rule):
    """Gather(weight `[V,H]`, ids) -> GatherBlockQuantized on int8 codes, or Cast(Gather(bf16))."""

    def pattern(self, op, weight, ids):
        return op.Gather(weight, ids, axis=0)

    def reason(self, weight, **_):
        return None if is_parameter(weight) and len(weight.shape) == 2 else OTHER

    def rewrite(self, op, weight, ids, **_):
        if self.context.weights == "bf16":
            return self._bf16(op, weight, ids)
        codes, scales = quantized(weight, "int8")
        axis = op.Constant(value_ints=[2])
        rows = op.GatherBlockQuantized(
            codes, ids, op.Unsqueeze(op.Cast(scales, to=ir.DataType.FLOAT), axis),
            bits=8, block_size=GROUP, gather_axis=0, quantize_axis=2, _domain="com.microsoft", _version=1,
        )  # fmt: skip
        rows.type, rows.shape = ir.TensorType(ir.DataType.FLOAT), ir.Shape(("b", "S", *codes.shape[1:]))
        hidden = weight.shape[1]
        flat = op.Reshape(rows, op.Constant(value=ir.tensor(np.array([0, 0, codes.shape[1] * GROUP]))))
        if hidden % GROUP == 0:
            return flat
        zero, last, end = (op.Constant(value_ints=[i]) for i in (0, 2, hidden))
        return op.Slice(flat, zero, end, last)

    def _bf16(self, op, weight, ids):
        return op.Cast(op.Gather(as_bf16(weight), ids, axis=0), to=ir.DataType.FLOAT)


def lower_embedding(model: ir.Model, context: RewriteContext, notes: list[str]) -> int:
    """Rewrites every gather from a parameter; output projections tied to it follow in `dense`."""
    model.graph.opset_imports["com.microsoft"] = 1
    count = EmbeddingRule(context, notes).apply(model)
    _cast_tied(model.graph)
    return count


def _cast_tied(graph: ir.Graph) -> None:
    """An output projection tied to bf16 embeddings multiplies with them cast to fp32."""
    for value in graph.initializers.values():
        if value.metadata_props.get(TRANSFORM) != "bf16":
            continue
        for user, index in list(value.uses()):
            if user.op_type not in ("Gather", "Cast"):
                cast = ir.node("Cast", [value], {"to": ir.DataType.FLOAT})
                cast.outputs[0].type, cast.outputs[0].shape = ir.TensorType(ir.DataType.FLOAT), value.shape
                graph.insert_before(user, cast)
                user.replace_input_with(index, cast.outputs[0])
