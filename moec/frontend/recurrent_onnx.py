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
    """S = decay S + w key^T with w = value, or beta (value - S key): the delta rule; out = S query.

    All vectors are columns or rows before the Scan, tokens are its first axis, products are sums:
    TensorRT-RTX 1.7.1 miscounts elements where a loop reshapes a slice, or multiplies it as a matrix.
    """
    last = _ints(-1)
    row = _ints(-2)
    vectors = [decay, op.Unsqueeze(value, last), op.Unsqueeze(key, row), op.Unsqueeze(query, row)]
    if beta is not None:
        vectors.append(op.Unsqueeze(beta, _ints(-1, -2)))
    vectors = [op.Transpose(x, perm=[1, 0, 2, 3, 4]) for x in vectors]
    rows = _rows(state, slot_ids, start)
    new, out = call_op(
        "Scan", rows, *vectors, _num_outputs=2, body=_body(len(vectors)), num_scan_inputs=len(vectors)
    )
    return op.Squeeze(op.Transpose(out, perm=[1, 0, 2, 3, 4]), last), _put(state, slot_ids, new)


def _body(count: int) -> ir.Graph:
    """One token: state `[b,H,P,N]` and its vectors -> the next state and out `[b,H,P,1]`."""
    inputs = [_value(n) for n in ("state", "decay", "value", "key", "query", "beta")[: 1 + count]]
    state, decay, value, key, query, *beta = inputs
    nodes = [ir.node("Constant", [], {"value": ir.tensor(np.array([-1]))})]
    axis = nodes[0].outputs[0]
    axis.name = "token.axis"

    def add(kind: str, a: ir.Value, b: ir.Value, **attributes: int) -> ir.Value:
        nodes.append(ir.node(kind, [a, b], attributes or None))
        out = nodes[-1].outputs[0]
        out.name, out.type = f"token.{len(nodes)}", ir.TensorType(ir.DataType.FLOAT)
        return out

    def read(matrix: ir.Value, row: ir.Value) -> ir.Value:
        return add("ReduceSum", add("Mul", matrix, row), axis, keepdims=1)

    decayed = add("Mul", decay, state)
    if beta:
        value = add("Mul", add("Sub", value, read(decayed, key)), beta[0])
    new = add("Add", decayed, add("Mul", value, key))
    return ir.Graph(inputs, [new, read(new, query)], nodes=nodes, name="token")


def _value(name: str) -> ir.Value:
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT))
