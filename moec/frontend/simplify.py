"""Turns the exporter's raw graph into the readable one: folding, standard fusions, no debugging metadata."""

from __future__ import annotations

import re

import onnx_ir as ir
import onnx_ir.passes.common as common
from onnxscript.optimizer._constant_folding import (
    DEFAULT_CONSTANT_FOLD_INPUT_SIZE_LIMIT,
    DEFAULT_CONSTANT_FOLD_OUTPUT_SIZE_LIMIT,
    FoldConstantsPass,
)
from onnxscript.rewriter import pattern
from onnxscript.rewriter.rules.common import (
    _basic_rules,
    _collapse_slices,
    _materialize_reshape_shape,
    _no_op,
)
from onnxscript.rewriter.rules.fusion._rms_normalization import rms_normalization_ruleset
from onnxscript.rewriter.rules.fusion._rotary_embedding import RotaryEmbedding23Fusion, _rotate_half_pattern

_KEPT_METADATA = ("pkg.torch.onnx.name_scopes", "pkg.torch.onnx.class_hierarchy")


class RotaryWithCast(RotaryEmbedding23Fusion):
    """The rotary pattern with cosine and sine cast: models in half precision."""

    def pattern(self, op, x, freqs, start1, end1, start2, end2, one1, one2):
        both = op.Concat(freqs, freqs, axis=-1)
        cos = op.Unsqueeze(op.Cast(op.Cos(both), _outputs=["cast"]), one1)
        sin = op.Unsqueeze(op.Cast(op.Sin(both)), one2)
        return x * cos + _rotate_half_pattern(op, x, start1, end1, start2, end2) * sin

    def rewrite(self, op, x, freqs, cast, **_):
        to = cast.producer().attributes["to"].as_int()
        cos, sin = op.Cast(op.Cos(freqs), to=to), op.Cast(op.Sin(freqs), to=to)
        return op.RotaryEmbedding(x, cos, sin, interleaved=0, num_heads=x.shape[1])


def simplify(model: ir.Model) -> None:
    """Folds constants, fuses norms and rotary embeddings, removes duplicates.

    Initializers without data are left alone, so parameters keep their names.
    """
    _fold(model)
    rms_normalization_ruleset.apply_to_model(model)
    fuse_rotary(model)
    merge_reshapes(model.graph)
    clean(model)
    _name_dimensions(model.graph)
    _strip_metadata(model)
    _name_last_hidden(model)


def _fold(model: ir.Model) -> None:
    """Constant folding and the few general rules that matter here: all of onnxscript's take minutes."""
    FoldConstantsPass(
        shape_inference=True,
        input_size_limit=DEFAULT_CONSTANT_FOLD_INPUT_SIZE_LIMIT,
        output_size_limit=DEFAULT_CONSTANT_FOLD_OUTPUT_SIZE_LIMIT,
    )(model)
    rules = [_basic_rules.squeeze_reshape_1d_rule, _basic_rules.unsqueeze_unsqueeze_rule]
    rules += [*_no_op.rules, *_collapse_slices.rules, *_materialize_reshape_shape.rules]
    pattern.RewriteRuleSet(rules).apply_to_model(model)
    common.IdentityEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.LiftConstantsToInitializersPass(lift_all_constants=True, size_limit=0)(model)
    common.DeduplicateInitializersPass()(model)
    common.CommonSubexpressionEliminationPass()(model)


def clean(model: ir.Model) -> None:
    """Merges equal subexpressions, drops dead nodes and initializers, sorts."""
    common.CommonSubexpressionEliminationPass()(model)
    common.RemoveUnusedNodesPass()(model)
    common.TopologicalSortPass()(model)


def fuse_rotary(model: ir.Model) -> int:
    """Fuses rotary embeddings; dead nodes remain. Returns how many."""
    rules = [RotaryEmbedding23Fusion.rule(), RotaryWithCast.rule()]
    return pattern.RewriteRuleSet(rules).apply_to_model(model)


def merge_reshapes(graph: ir.Graph) -> None:
    """Reshape(Reshape(x, _), s) -> Reshape(x, s), and reshapes to the shape that x has -> x."""
    for node in graph:
        if node.op_type != "Reshape":
            continue
        source = node.inputs[0].producer()
        if source is not None and source.op_type == "Reshape" and not _copies_dimensions(node):
            node.replace_input_with(0, source.inputs[0])
        out, x = node.outputs[0], node.inputs[0]
        if not out.is_graph_output() and same_known_shape(out.shape, x.shape):
            out.replace_all_uses_with(x)


def _copies_dimensions(reshape: ir.Node) -> bool:
    allow_zero = reshape.attributes.get("allowzero")
    if allow_zero is not None and allow_zero.as_int():
        return False
    shape = reshape.inputs[1].const_value
    return shape is None or 0 in shape.numpy()


def same_known_shape(a: ir.Shape | None, b: ir.Shape | None) -> bool:
    """Whether two shapes agree, every dimension a number or a name."""
    if a is None or b is None or len(a) != len(b):
        return False
    known = all(isinstance(d, int) or d.value is not None for d in a)
    return known and all(x == y for x, y in zip(a, b, strict=True))


def _name_dimensions(graph: ir.Graph) -> None:
    """torch numbers its symbols (s16, s70): rows become b, tokens S."""
    ids = next(v for v in graph.inputs if v.name == "input_ids")
    names = {str(ids.shape[0]): "b", str(ids.shape[1]): "S"}
    values = [*graph.inputs, *(o for n in graph for o in n.outputs)]
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape([_named(d, names) for d in value.shape])


def _named(dim: int | ir.SymbolicDim, names: dict[str, str]) -> int | str | None:
    if isinstance(dim, int) or dim.value is None:
        return dim if isinstance(dim, int) else None
    return re.sub(r"s\d+", lambda m: names.get(m[0], m[0]), str(dim.value))


def _strip_metadata(model: ir.Model) -> None:
    for item in (model.graph, *model.graph):
        for key in [k for k in item.metadata_props if k not in _KEPT_METADATA]:
            del item.metadata_props[key]
    for node in model.graph:
        for value in node.outputs:
            value.metadata_props.clear()


def _name_last_hidden(model: ir.Model) -> None:
    """The gather before the output projection, see `rewrite/graph_edit.py`."""
    for node in model.graph:
        batch_dims = node.attributes.get("batch_dims")
        indices = node.inputs[1] if node.op_type == "GatherND" else None
        if indices is None or batch_dims is None or batch_dims.as_int() != 1:
            continue
        if indices.shape is not None and len(indices.shape) == 2:  # one token a row
            node.inputs[0].name, node.outputs[0].name = "moec.all_hidden", "moec.last_hidden"
