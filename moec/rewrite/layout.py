"""Removes the transposes between head-major standard attention and token-major moec::AsymKVAttention."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from moec.frontend.simplify import same_known_shape
from moec.rewrite.context import OTHER, RewriteContext, Rule, attribute

_SWAP = [0, 2, 1, 3]


class TransposeTwice(Rule):
    """Transpose(Transpose(x)) -> x for the exchange of heads and tokens."""

    def pattern(self, op, x):
        return op.Transpose(op.Transpose(x, perm=_SWAP), perm=_SWAP)

    def reason(self, **_):
        return None

    def rewrite(self, op, x):
        return op.Identity(x)


class RotaryByToken(Rule):
    """Transpose(RotaryEmbedding(Transpose(x `[b,S,H,D]`))) -> RotaryEmbedding on `[b,S,H*D]`."""

    def pattern(self, op, x, cos, sin):
        y = op.RotaryEmbedding(
            op.Transpose(x, perm=_SWAP), cos, sin, _allow_other_attributes=True, _outputs=["rotated"]
        )
        return op.Transpose(y, perm=_SWAP)

    def reason(self, x, rotated, **_):
        if x.shape is None or len(x.shape) != 4 or not all(isinstance(d, int) for d in x.shape[2:]):
            return f"rotary embedding {rotated.name}", "heads and dimension are not static"
        return None

    def rewrite(self, op, x, cos, sin, rotated):
        heads, dim = x.shape[2], x.shape[3]
        flat = op.Reshape(x, op.Constant(value=ir.tensor(np.array([0, 0, heads * dim]))))
        y = op.RotaryEmbedding(flat, cos, sin, interleaved=attribute(rotated, "interleaved"), num_heads=heads)
        return op.Reshape(y, op.Constant(value=ir.tensor(np.array([0, 0, heads, dim]))))


class SplitAndJoin(Rule):
    """Reshape(Reshape(x `[b,S,H*D]`, `[b,S,H,D]`), `[b,S,H*D]`) -> x."""

    def pattern(self, op, x, inner_shape, shape):
        inner = op.Reshape(x, inner_shape, _allow_other_attributes=True)
        return op.Reshape(inner, shape, _outputs=["out"])

    def reason(self, x, shape, out, **_):
        if x.shape is None or len(x.shape) != 3:
            return OTHER
        wanted = shape.const_value
        if wanted is not None and wanted.numpy().tolist() == [0, 0, x.shape[-1]]:
            return None
        return None if same_known_shape(x.shape, out.shape) else OTHER

    def rewrite(self, op, x, **_):
        return op.Identity(x)


def lower_layout(model: ir.Model, context: RewriteContext, notes: list[str]) -> int:
    """Applies the three rules."""
    return sum(r(context, notes).apply(model) for r in (RotaryByToken, TransposeTwice, SplitAndJoin))
