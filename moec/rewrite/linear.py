"""Nodes of moec::FusedLinear, the CPU backend's operator for dense layers that read one tensor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

NAME = "FusedLinear"


@dataclass
class Linear:
    """What a node computes: `matrices` are (codes, scales) or (weight,), each with its bias or None.

    The first output is activated with the second product (`activation`), multiplied with the sigmoid of
    `gate`, and gets `addends` added. With `norm` (a weight `[K]`) x is normalized first (RMSNormalization);
    with `keep` that is the last output.
    """

    x: ir.Value
    matrices: list[tuple[tuple[ir.Value, ...], ir.Value | None]]
    activation: str = "none"
    gate: ir.Value | None = None
    addends: tuple[ir.Value, ...] = ()
    norm: ir.Value | None = None
    epsilon: float = 0.0
    keep: bool = False

    @property
    def plain(self) -> bool:
        """Whether it reads nothing but x and parameters."""
        return self.gate is None and not self.addends

    def rows(self, index: int) -> int:
        """Output features of a matrix."""
        return self.matrices[index][0][0].shape[0]

    def inputs(self) -> list[ir.Value]:
        flat = [self.x, *([self.norm] if self.norm is not None else [])]
        for weight, bias in self.matrices:
            flat += [*weight, *([bias] if bias is not None else [])]
        return [*flat, *([self.gate] if self.gate is not None else []), *self.addends]

    def attributes(self) -> dict[str, Any]:
        biases = "".join("01"[bias is not None] for _, bias in self.matrices)
        gate = int(self.gate is not None)
        return {
            "activation": self.activation,
            "addends": len(self.addends),
            "biases": biases,
            "epsilon": float(self.epsilon),
            "gate": gate,
            "keep": int(self.keep),
            "norm": int(self.norm is not None),
        }

    def node(self, outputs: Sequence[ir.Value]) -> ir.Node:
        """A node with these values as outputs (they must have no producer)."""
        return ir.node(
            NAME, self.inputs(), self.attributes(), domain="moec", version=1, outputs=list(outputs)
        )


def read(node: ir.Node) -> Linear:
    """The inverse of `Linear.node`."""
    attributes = {name: a.value for name, a in node.attributes.items()}
    matrices, rest = [], list(node.inputs[1:])
    norm = rest.pop(0) if attributes["norm"] else None
    for biased in attributes["biases"]:
        size = 1 if rest[0].dtype == ir.DataType.FLOAT else 2
        matrices.append((tuple(rest[:size]), rest[size] if biased == "1" else None))
        rest = rest[size + int(biased) :]
    gate = rest.pop(0) if attributes["gate"] else None
    return Linear(
        node.inputs[0],
        matrices,
        attributes["activation"],
        gate,
        tuple(rest),
        norm,
        attributes["epsilon"],
        bool(attributes["keep"]),
    )


def fused_linear(op: Any, x: ir.Value, weight: Sequence[ir.Value], bias: ir.Value | None) -> ir.Value:
    """x times one matrix, made in a rewrite rule."""
    linear = Linear(x, [(tuple(weight), bias)])
    return op.FusedLinear(*linear.inputs(), **linear.attributes(), _domain="moec", _version=1)
