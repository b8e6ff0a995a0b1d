"""Small edits of finished graphs: logits of every token, function bodies."""

from __future__ import annotations

import onnx_ir as ir

from moec.errors import MoecError


def all_logits(model: ir.Model) -> ir.Model:
    """Makes `logits` `[b,S,V]`, one row for every token, in place; exported, rewritten and CPU graphs alike.

    Raises:
        MoecError: The graph has no value "moec.last_hidden".
    """
    last = next((o for n in model.graph for o in n.outputs if o.name == "moec.last_hidden"), None)
    if last is None:
        raise MoecError("this graph does not name its last hidden state")
    last.replace_all_uses_with(last.producer().inputs[0])
    logits = next(o for o in model.graph.outputs if o.name == "logits")
    logits.shape = ir.Shape(("b", "S", logits.shape[-1]))
    _forget_shapes(logits, stop=last.producer().inputs[0])
    return model


def _forget_shapes(value: ir.Value, stop: ir.Value) -> None:
    """Shapes between the hidden state and the logits have one dimension more now."""
    node = value.producer()
    while node is not None and node.inputs and node.inputs[0] is not stop:
        node = node.inputs[0].producer()
        if node is not None:
            for out in node.outputs:
                out.shape = None


def with_functions(model: ir.Model) -> ir.Model:
    """Attaches function bodies of all moec operators, in place, so that stock ONNX Runtime runs it."""
    from moec.dialect.functions import attach

    attach(model)
    return model
