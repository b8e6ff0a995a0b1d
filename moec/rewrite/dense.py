"""Dense layers -> moec::FusedLinear on int4 codes (head and sensitive ones: int8), or MatMul on bf16 weights.

FusedLinear is an operator of the CPU backend (plugins/cpu/fused_linear.cpp; see moec.reference.linear);
`fuse` joins what this pass makes.
"""

from __future__ import annotations

import onnx_ir as ir
from onnxscript.rewriter import pattern

from moec.rewrite.context import OTHER, RewriteContext, Rule
from moec.rewrite.linear import fused_linear
from moec.rewrite.parameters import as_bf16, is_parameter, quantized
from moec.rewrite.sensitive import sensitive_weights

MIN_ROWS = 16  # gates of a few rows stay fp32: they cost nothing and quantize badly


class DenseRule(Rule):
    """MatMul(x, Transpose(weight `[N,K]`)), with its bias if it has one."""

    def __init__(self, context: RewriteContext, notes: list[str], bias: bool, eight_bits: set[str]) -> None:
        super().__init__(context, notes)
        self.bias, self.eight_bits = bias, eight_bits

    def pattern(self, op, x, weight):
        y = op.MatMul(x, op.Transpose(weight, perm=[1, 0]))
        return op.Add(y, pattern.Var("bias")) if self.bias else y

    def reason(self, weight, bias=None, **_):
        if not is_parameter(weight) or len(weight.shape) != 2:
            return OTHER
        if self._stays_float(weight) and self.context.weights == "bf16":
            return weight.name, "stays fp32 (a router or a gate)"
        if self.bias and not (is_parameter(bias) and tuple(bias.shape) == (weight.shape[0],)):
            return weight.name, "what is added is no bias"
        return None

    def _stays_float(self, weight: ir.Value) -> bool:
        return weight.name in self.context.keep_float or weight.shape[0] < MIN_ROWS

    def rewrite(self, op, x, weight, bias=None):
        if self.context.weights == "bf16":
            return self._bf16(op, x, weight, bias)
        if self._stays_float(weight):
            self.notes.append(f"{weight.name}: stays fp32 (a router or a gate)")
            return fused_linear(op, x, [weight], bias)
        bits = 8 if weight.name in self.eight_bits else 4
        return fused_linear(op, x, quantized(weight, f"int{bits}"), bias)

    def _bf16(self, op, x, weight, bias):
        w = op.Cast(as_bf16(weight), to=ir.DataType.FLOAT)
        y = op.MatMul(x, op.Transpose(w, perm=[1, 0]))
        return y if bias is None else op.Add(y, bias)


def lower_dense(model: ir.Model, context: RewriteContext, notes: list[str]) -> int:
    """Rewrites dense layers. The head (which may share its codes with the embeddings) and layers whose error
    the model feels most get 8 bits."""
    eight_bits = _output_projections(model.graph) | sensitive_weights(model.graph)
    with_bias, plain = DenseRule(context, [], True, eight_bits), DenseRule(context, notes, False, eight_bits)
    return with_bias.apply(model) + plain.apply(model)


def _output_projections(graph: ir.Graph) -> set[str]:
    """Names of the weights that the last hidden state is multiplied with."""
    hidden = [o for n in graph for o in n.outputs if o.name == "moec.last_hidden"]
    products = [u.node for v in hidden for u in v.uses() if u.node.op_type == "MatMul"]
    transposes = [n.inputs[1].producer() for n in products]
    return {t.inputs[0].name for t in transposes if t is not None and t.op_type == "Transpose"}
