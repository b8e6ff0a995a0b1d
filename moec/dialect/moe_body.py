"""The ONNX function bodies of moec::PipelinedMoE and moec::Experts, generated for one layer variant.

All experts are dequantized and run on all tokens, then the chosen results are gathered: E/K times the work of
a kernel, but memory does not grow with tokens times weights. Products are float32 whatever `compute` says.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from moec.dialect.emit import F32, I8, I32, I64, U8, Body, Value
from moec.errors import MoecError
from moec.reference.experts import BlobLayout
from moec.reference.routing import RouterConfig


@dataclass(frozen=True)
class MoEVariant:
    """Everything that a body depends on; `router` is None for moec::Experts."""

    layout: BlobLayout
    num_experts: int
    top_k: int
    activation: str
    alpha: float
    limit: float
    router: RouterConfig | None

    @property
    def label(self) -> str:
        blob = self.layout
        sizes = f"{blob.hidden_size}x{blob.intermediate_size}"
        return f"{blob.weight_format}_e{self.num_experts}k{self.top_k}_{sizes}"

    @classmethod
    def of_node(cls, attributes: dict[str, Any], shape: Callable[[str], tuple]) -> MoEVariant:
        """From completed attributes and the shapes of experts and of router_weight or hidden."""
        a = attributes
        routed = "scoring" in a
        hidden = shape("router_weight" if routed else "hidden")[1]
        sizes = hidden, a["intermediate_size"], bool(a["gated"]), bool(a["has_bias"]), a["group_size"]
        layout = BlobLayout(a["weight_format"], *sizes)
        if a["num_slots"] or shape("experts") != (a["num_experts"], layout.blob_bytes):
            raise MoecError(f"no function body for {a['num_slots']} slots over blobs {shape('experts')}")
        names = ("num_experts", "top_k", "scoring", "renormalize", "num_groups", "topk_groups", "group_score")
        router = RouterConfig(*(a[name] for name in names), a["routed_scale"]) if routed else None
        rest = a["num_experts"], a["top_k"], a["activation"], a["alpha"], a["limit"]
        return cls(layout, *rest, router)


def _powers(exponent_bits: int, lowest: int, implicit: int) -> tuple[np.ndarray, np.ndarray]:
    """Tables over (sign, exponent): factor and implicit bit; 2^lowest is the smallest number."""
    exponent = np.arange(2 << exponent_bits)
    sign, exponent = np.where(exponent >> exponent_bits, -1.0, 1.0), exponent % (1 << exponent_bits)
    with np.errstate(over="ignore"):
        factor = sign * 2.0 ** (lowest + np.maximum(exponent, 1) - 1)
    return factor, np.where(exponent > 0, implicit, 0)


def _float_of(head: Value, mantissa: Value, exponent_bits: int, lowest: int, implicit: int) -> Value:
    """Floats from sign and exponent (int32 `head`) and mantissa (int32), exactly."""
    body = head.body
    factor, hidden = _powers(exponent_bits, lowest, implicit)
    whole = (mantissa + body.constant(hidden, I32).gather(head)).cast(F32)
    return whole * body.constant(factor, F32).gather(head)


def _bytes(data: Value, width: int) -> list[Value]:
    """uint8 `[E, n*width]` -> `width` int32 values `[E, n]`, lowest byte first."""
    parts = data.reshape(0, -1, width).cast(I32).split(2, width)
    return [part.reshape(0, -1) for part in parts]


# Opset 24 has no BitCast: floats in blobs are put together from their bytes.
def _half(data: Value) -> Value:
    low, high = _bytes(data, 2)
    return _float_of(high // 4, high % 4 * 256 + low, 5, -24, 1 << 10)


def _bfloat(data: Value) -> Value:
    low, high = _bytes(data, 2)
    return _float_of(high * 2 + low // 128, low % 128, 8, -133, 1 << 7)


def _single(data: Value) -> Value:
    b0, b1, b2, b3 = _bytes(data, 4)
    return _float_of(b3 * 2 + b2 // 128, b2 % 128 * 65536 + b1 * 256 + b0, 8, -149, 1 << 23)


class _MoE:
    """Emits the body; E experts, T tokens, K chosen, R rows of gate_up."""

    def __init__(self, variant: MoEVariant) -> None:
        self.variant, self.layout, self.body = variant, variant.layout, Body()
        body = self.body
        self.blobs = body.input("experts", I8).cast(U8)
        count = body.input("num_tokens", I32).cast(I64)
        hidden = body.input("hidden", F32)
        self.tokens = hidden.size(0)
        per_row = body.arange(self.tokens // count.size(0))
        self.valid = (per_row < count.unsqueeze(1)).reshape(-1, 1)  # [T,1]
        self.hidden = body.where(self.valid, hidden, 0.0)

    def emit(self) -> Body:
        ids, weights = self._route() if self.variant.router else self._given_choice()
        results = self._all_experts().gather_rows(ids)  # [T,K,H]
        weighted = results * weights.unsqueeze(2)
        k = self.variant.top_k
        terms = weighted.split(1, k) if k > 1 else [weighted]
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        out = total.reshape(self.tokens, self.layout.hidden_size)
        self.body.result("out", self.body.where(self.valid, out, 0.0))
        self.body.result("residency_out", self.body.input("residency", I32))
        self.body.result("staging_out", self.body.input("staging", I8))
        return self.body

    def _given_choice(self) -> tuple[Value, Value]:
        ids = self.body.where(self.valid, self.body.input("ids", I32), 0).cast(I64)
        return ids, self.body.where(self.valid, self.body.input("weights", F32), 0.0)

    def _top_k(self, scores: Value, k: int) -> tuple[Value, Value]:
        values, indices = self.body.op("TopK", scores, self.body.ints(k), outputs=2, axis=-1)
        return values, Value(self.body, indices.name, I64)

    def _route(self) -> tuple[Value, Value]:
        """ids int64 `[T,K]`, weights `[T,K]`."""
        router, body = self.variant.router, self.body
        logits = self.hidden @ body.input("router_weight", F32).transpose(1, 0)
        logits = logits + body.input("router_bias", F32)
        score = {"softmax": ("Softmax", {"axis": -1}), "sigmoid": ("Sigmoid", {})}.get(router.scoring)
        scores = logits.unary(score[0], **score[1]) if score else logits
        choice = scores + body.input("selection_bias", F32)
        if router.grouped:
            choice = self._mask_groups(choice)
        _, ids = self._top_k(choice, router.top_k)
        weights = scores.gather_elements(ids, 1)
        if router.scoring == "softmax_after_topk":
            weights = weights.unary("Softmax", axis=-1)
        elif router.renormalize:
            weights = weights / (weights.reduce("ReduceSum", 1) + 1e-20)
        return ids, weights * router.routed_scale

    def _mask_groups(self, choice: Value) -> Value:
        router = self.variant.router
        size = router.num_experts // router.num_groups
        groups = choice.reshape(0, router.num_groups, size)
        if router.group_score == "max" or size == 1:
            score = groups.reduce("ReduceMax", 2, keepdims=0)
        else:
            score = self._top_k(groups, 2)[0].reduce("ReduceSum", 2, keepdims=0)
        _, best = self._top_k(score, router.topk_groups)
        group = self.body.constant(np.arange(router.num_groups)[None, None], I64)
        chosen = best.unsqueeze(2).equal(group).cast(I32).reduce("ReduceMax", 1, keepdims=0) > 0
        masked = self.body.where(chosen.unsqueeze(2), groups, float("-inf"))
        return masked.reshape(0, router.num_experts)

    def _section(self, name: str) -> Value:
        section = self.layout.sections[name]
        return self.blobs.slice(section.offset, section.end, 1)

    def _matrix(self, name: str, rows: int, columns: int) -> Value:
        """float32 `[E,rows,columns]`."""
        if self.layout.weight_format == "bf16":
            return _bfloat(self._section(name)).reshape(0, rows, columns)
        size = self.layout.group_size
        codes = self._section(f"{name}_codes").reshape(0, rows, -1, size // 2, 1)
        low, high = codes & self.body.constant(15, U8), codes >> self.body.constant(4, U8)
        levels = self.body.concat([low, high], 4).reshape(0, rows, -1, size).cast(F32) - 8.0
        scales = _half(self._section(f"{name}_scales")).reshape(0, rows, -1, 1)
        return (levels * scales).reshape(0, rows, -1).slice(0, columns, 2)

    def _biased(self, x: Value, name: str) -> Value:
        return x + _single(self._section(name)).unsqueeze(2) if self.layout.has_bias else x

    def _all_experts(self) -> Value:
        """Every expert on every token: `[T,E,H]`."""
        layout = self.layout
        size = layout.intermediate_size
        gate_up = self._matrix("gate_up", layout.gate_up_rows, layout.hidden_size)
        h = self._biased(gate_up @ self.hidden.transpose(1, 0), "gate_up_bias")  # [E,R,T]
        up = h.slice(size, 2 * size, 1) if layout.gated else None
        h = self._activate(h.slice(0, size, 1), up)
        down = self._matrix("down", layout.hidden_size, size)
        return self._biased(down @ h, "down_bias").transpose(2, 0, 1)

    def _activate(self, gate: Value, up: Value | None) -> Value:
        name, variant = self.variant.activation, self.variant
        if name == "swiglu_oai":
            gate = gate.minimum(variant.limit)
            return (
                (up.clip(-variant.limit, variant.limit) + 1.0)
                * gate
                * (gate * variant.alpha).unary("Sigmoid")
            )
        if name == "silu":
            value = gate * gate.unary("Sigmoid")
        elif name == "relu2":
            positive = gate.unary("Relu")
            value = positive * positive
        else:
            value = gate.unary("Gelu", approximate="tanh" if name == "gelu_tanh" else "none")
        return value if up is None else value * up


def moe_body(variant: MoEVariant) -> Body:
    """Nodes whose inputs and outputs have the names of the operator in `OPS`; float32 activations."""
    return _MoE(variant).emit()
