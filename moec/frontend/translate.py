"""Standard ONNX (opset 24) for the traced operators: what `exported.onnx` holds and the rewriter matches."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import torch
from onnxscript.onnx_opset import opset24 as op

from moec.frontend import ops as _ops  # noqa: F401  (defines torch.ops.moec)
from moec.frontend import recurrent_onnx


def _ints(*values: int) -> Any:
    return op.Constant(value=ir.tensor(np.array(values, np.int64)))


def _int(value: int) -> Any:
    return op.Constant(value=ir.tensor(np.array(value, np.int64)))


def _mask(positions: Any, context: int, window: int) -> Any:
    """Bool `[b,1,S,M+S]`: key j is visible to the query at position n if j <= n (and j > n - window).

    Keys are the M rows of the cache and S spare rows, which only padding tokens at the end of the context
    reach.
    """
    query = op.Unsqueeze(positions, _ints(1, 3))
    total = op.Add(op.Squeeze(op.Shape(positions, start=1, end=2)), _int(context))
    key = op.Range(_int(0), total, _int(1))
    seen = op.LessOrEqual(key, query)
    if window:
        seen = op.And(seen, op.Greater(key, op.Sub(query, _int(window))))
    return seen


def _append(past: Any, new: Any, slot_ids: Any, start: Any) -> tuple[Any, Any]:
    """The rows' caches with the new tokens at `start` `[b,Hkv,M+S,D]`, and the whole cache updated."""
    context = past.shape[2]
    rows = op.Concat(op.Gather(past, slot_ids, axis=0), new, axis=2)
    rows = op.TensorScatter(rows, new, start, axis=2, mode="linear")
    kept = op.Slice(rows, _ints(0), _ints(context), _ints(2))
    slots = op.Unsqueeze(op.Cast(slot_ids, to=ir.DataType.INT64), _ints(1))
    return rows, op.ScatterND(past, slots, kept)


def attention(
    q, k, v, past_k, past_v, slot_ids, start, positions, sinks=None,
    scale: float = 1.0, window: int = 0, softcap: float = 0.0, layer: int = 0,
):  # fmt: skip
    """TensorScatter into the gathered slots, Attention with a bool mask, ScatterND back."""
    start = op.Cast(start, to=ir.DataType.INT64)
    keys, present_k = _append(past_k, k, slot_ids, start)
    values, present_v = _append(past_v, v, slot_ids, start)
    mask = _mask(positions, past_k.shape[2], window)
    if sinks is None and not softcap:
        y, *_ = op.Attention(q, keys, values, mask, scale=scale)
    else:
        keys, values = _repeat(keys, k, q), _repeat(values, v, q)
        y = _spelled_out(q, keys, values, mask, sinks, scale, softcap)
    flat = _ints(0, 0, q.shape[1] * v.shape[3])
    return op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), flat), present_k, present_v


def _spelled_out(q, keys, values, mask, sinks, scale: float, softcap: float):
    """Attention with sink logits, which no operator has, or a soft cap, whose order with masks varies."""
    heads = q.shape[1]
    constant = lambda x: op.CastLike(op.Constant(value_float=x), q)  # noqa: E731
    s = op.Mul(op.MatMul(q, op.Transpose(keys, perm=[0, 1, 3, 2])), constant(scale))
    if softcap:
        s = op.Mul(op.Tanh(op.Div(s, constant(softcap))), constant(softcap))
    s = op.Where(mask, s, constant(float("-inf")))
    if sinks is None:
        return op.MatMul(op.Softmax(s, axis=-1), values)
    one = op.Slice(s, _ints(0), _ints(1), _ints(3))
    sink = op.Expand(op.Reshape(sinks, _ints(1, heads, 1, 1)), op.Shape(one))
    p = op.Softmax(op.Concat(s, sink, axis=-1), axis=-1)
    return op.MatMul(op.Slice(p, _ints(0), _ints(-1), _ints(3)), values)


def _repeat(rows: Any, new: Any, q: Any) -> Any:
    """Cache rows `[b,Hkv,N,D]` -> `[b,Hq,N,D]`: each head as often as it has queries."""
    (_, kv_heads, _, dim), heads = new.shape, q.shape[1]
    if kv_heads == heads:
        return rows
    rows = op.Expand(op.Unsqueeze(rows, _ints(2)), _ints(1, 1, heads // kv_heads, 1, 1))
    return op.Reshape(rows, _ints(0, heads, -1, dim))


def experts(
    x, ids, weights, gate_up, down, gate_up_bias=None, down_bias=None, activation: str = "silu",
    gated: bool = True, transposed: bool = False, interleaved: bool = False, alpha: float = 1.0,
    limit: float = 0.0, layer: int = 0,
):  # fmt: skip
    """Gathers the chosen experts' weights `[T,K,...]` and multiplies: readable, and slow for long inputs."""
    h = _expert_linear(op.Unsqueeze(x, _ints(1)), gate_up, gate_up_bias, ids, transposed)
    h = _gate(h, activation, interleaved, alpha, limit) if gated else _activate(h, activation)
    y = _expert_linear(h, down, down_bias, ids, transposed)
    return op.ReduceSum(op.Mul(y, op.Unsqueeze(weights, _ints(2))), _ints(1), keepdims=0)


def _expert_linear(h: Any, weight: Any, bias: Any, ids: Any, transposed: bool) -> Any:
    """h `[T,1|K,in]` times the weights of the experts `ids [T,K]` -> `[T,K,out]`."""
    w = op.Gather(weight, ids, axis=0)
    w = w if transposed else op.Transpose(w, perm=[0, 1, 3, 2])
    y = op.Squeeze(op.MatMul(op.Unsqueeze(h, _ints(2)), w), _ints(2))
    return y if bias is None else op.Add(y, op.Gather(bias, ids, axis=0))


def _gate(h: Any, activation: str, interleaved: bool, alpha: float, limit: float) -> Any:
    if interleaved:
        end = _ints(np.iinfo(np.int64).max)
        g, u = (op.Slice(h, _ints(i), end, _ints(2), _ints(2)) for i in (0, 1))
    else:
        g, u = op.Split(h, axis=-1, num_outputs=2)
    if activation != "swiglu_oai":
        return op.Mul(_activate(g, activation), u)
    constant = lambda v: op.CastLike(op.Constant(value_float=v), h)  # noqa: E731
    g, u = op.Min(g, constant(limit)), op.Clip(u, constant(-limit), constant(limit))
    return op.Mul(op.Add(u, constant(1.0)), op.Mul(g, op.Sigmoid(op.Mul(g, constant(alpha)))))


def _activate(x: Any, activation: str) -> Any:
    match activation:
        case "silu":
            return op.Swish(x)
        case "gelu" | "gelu_tanh":
            return op.Gelu(x, approximate="tanh" if activation == "gelu_tanh" else "none")
        case "relu2":
            r = op.Relu(x)
            return op.Mul(r, r)
    raise ValueError(activation)


def last_hidden(hidden, num_tokens):
    """Row `max(num_tokens, 1) - 1` of each sequence."""
    last = op.Sub(op.Max(op.Cast(num_tokens, to=ir.DataType.INT64), _int(1)), _int(1))
    return op.GatherND(hidden, op.Unsqueeze(last, _ints(1)), batch_dims=1)


def linear(x, weight, bias=None):
    """One form whatever the rank of x, so that one rule finds every dense layer."""
    y = op.MatMul(x, op.Transpose(weight, perm=[1, 0]))
    return y if bias is None else op.Add(y, bias)


TABLE = {
    torch.ops.moec.attention.default: attention,
    torch.ops.moec.experts.default: experts,
    torch.ops.moec.conv_state.default: recurrent_onnx.conv_state,
    torch.ops.moec.recurrence.default: recurrent_onnx.recurrence,
    torch.ops.moec.last_hidden.default: last_hidden,
    torch.ops.aten.linear.default: linear,
}
