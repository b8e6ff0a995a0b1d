"""Standard ONNX for recurrent layers: the tokens before a convolution, and a Scan over tokens.

The state of a row is gathered from its slot, taken as zero where the slot is empty, and scattered back. A
row's padding leaves it alone: it has no part in the last K tokens, and a decay of 1 with nothing to add.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
from onnxscript.onnx_opset import opset24 as op

# onnxscript's own op.Scan cannot be told how many outputs there are.
from torch.onnx._internal.exporter._torchlib.ops.hop import call_op


def _ints(*values: int) -> Any:
    return op.Constant(value=ir.tensor(np.array(values, np.int64)))


def _rows(state: Any, slot_ids: Any, start: Any) -> Any:
    """The rows' states, zero where nothing is cached."""
    rows = op.Gather(state, slot_ids, axis=0)
    used = op.Cast(op.Greater(start, op.CastLike(_ints(0), start)), to=ir.DataType.FLOAT)
    return op.Mul(rows, op.Unsqueeze(used, _ints(*range(1, len(state.shape)))))


def _put(state: Any, slot_ids: Any, rows: Any) -> Any:
    return op.ScatterND(state, op.Unsqueeze(op.Cast(slot_ids, to=ir.DataType.INT64), _ints(1)), rows)


def conv_state(x, state, slot_ids, start, num_tokens):
    """x `[b,C,S]` -> `[b,C,K+S]`; the new state is the K tokens that end at the last valid one."""
    kept = state.shape[2]
    full = op.Concat(_rows(state, slot_ids, start), x, axis=2)
    first = op.Unsqueeze(op.Cast(num_tokens, to=ir.DataType.INT64), _ints(1))
    index = op.Add(first, op.Constant(value=ir.tensor(np.arange(kept, dtype=np.int64))))
    by_token = op.GatherND(op.Transpose(full, perm=[0, 2, 1]), op.Unsqueeze(index, _ints(2)), batch_dims=1)
    return full, _put(state, slot_ids, op.Transpose(by_token, perm=[0, 2, 1]))


def recurrence(decay, value, key, query, beta, state, slot_ids, start):
    """S = decay S + w key^T with w = value, or beta (value - S key): the delta rule; out = S query."""
    scanned = [decay, value, key, query, *([beta] if beta is not None else [])]
    rows = _rows(state, slot_ids, start)
    body = _body(rows, scanned)
    last, out = call_op(
        "Scan", rows, *scanned, _num_outputs=2, body=body, num_scan_inputs=len(scanned),
        scan_input_axes=[1] * len(scanned), scan_output_axes=[1],
    )  # fmt: skip
    return out, _put(state, slot_ids, last)


def _body(rows: Any, scanned: list[Any]) -> ir.Graph:
    """One token: state `[b,H,P,N]` and slices of the scanned values -> the next state and out `[b,H,P]`."""
    names = ("decay", "value", "key", "query", "beta")
    state = _value("state", ir.Shape(rows.shape) if rows.shape is not None else None)
    inputs = [_value(n, ir.Shape([*x.shape[:1], *x.shape[2:]])) for n, x in zip(names, scanned, strict=False)]
    decay, value, key, query, *beta = inputs
    tape = _Tape()
    decayed = tape.op("Mul", decay, state)
    column, row = tape.op("Unsqueeze", key, tape.ints(-1)), tape.op("Unsqueeze", key, tape.ints(-2))
    if beta:
        known = tape.op("Squeeze", tape.op("MatMul", decayed, column), tape.ints(-1))
        missing = tape.op("Sub", value, known)
        value = tape.op("Mul", missing, tape.op("Unsqueeze", beta[0], tape.ints(-1)))
    update = tape.op("Mul", tape.op("Unsqueeze", value, tape.ints(-1)), row)
    new = tape.op("Add", decayed, update)
    read = tape.op("MatMul", new, tape.op("Unsqueeze", query, tape.ints(-1)))
    out = tape.op("Squeeze", read, tape.ints(-1))
    for result, like in ((new, state), (out, inputs[1])):
        result.type, result.shape = like.type, like.shape
    return ir.Graph([state, *inputs], [new, out], nodes=tape.nodes, name="token")


def _value(name: str, shape: ir.Shape | None) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=shape)


class _Tape:
    """Nodes of the body, in order."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []

    def op(self, kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        node = ir.node(kind, list(inputs), attributes or None)
        node.outputs[0].name = f"token.{len(self.nodes)}"
        self.nodes.append(node)
        return node.outputs[0]

    def ints(self, *values: int) -> ir.Value:
        return self.op("Constant", value=ir.tensor(np.array(values, np.int64)))
