"""Routers written in plain ONNX are identified with all their constants; what does not fit is said so."""

from __future__ import annotations

import itertools

import numpy as np
import onnx_ir as ir
import pytest

from moec.rewrite.router_fit import fit_router
from moec.rewrite.subgraph import backward_slice

E, K, H = 16, 3, 24


class _Build:
    """A router graph with parameters that have no data, as captured models have them."""

    def __init__(self) -> None:
        self.nodes: list[ir.Node] = []
        self.x = self._value("x", (None, H))
        self.parameters: list[ir.Value] = []

    def _value(self, name, shape):
        return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))

    def parameter(self, name, *shape):
        self.parameters.append(self._value(name, shape))
        return self.parameters[-1]

    def constant(self, array):
        tensor = ir.tensor(np.asarray(array))
        value = ir.Value(
            name=f"c{len(self.parameters)}", const_value=tensor, type=ir.TensorType(tensor.dtype)
        )
        value.shape = tensor.shape
        self.parameters.append(value)
        return value

    def __call__(self, kind, *inputs, outputs=1, **attributes):
        node = ir.node(kind, list(inputs), attributes, num_outputs=outputs)
        for i, out in enumerate(node.outputs):
            out.name = f"v{len(self.nodes)}_{i}"
        self.nodes.append(node)
        return node.outputs[0] if outputs == 1 else node.outputs

    def fit(self, ids, weights):
        ids.type = ir.TensorType(ir.DataType.INT64)
        for v in (ids, weights):
            v.shape = ir.Shape((None, K))
        ir.Graph(
            [self.x], [ids, weights], nodes=self.nodes, initializers=self.parameters, opset_imports={"": 24}
        )
        return fit_router(backward_slice([ids, weights], [self.x]), E, K)


def _router(scoring, renormalize, bias, selection, scale=1.0, groups=None):
    b = _Build()
    logits = b("MatMul", b.x, b("Transpose", b.parameter("gate.weight", E, H), perm=[1, 0]))
    if bias:
        logits = b("Add", logits, b.parameter("gate.bias", E))
    scores = {"softmax": lambda: b("Softmax", logits, axis=-1), "sigmoid": lambda: b("Sigmoid", logits)}.get(
        scoring, lambda: logits
    )()
    choice = b("Add", scores, b.parameter("correction", E)) if selection else scores
    if groups:
        choice = _masked(b, choice, *groups)
    values, ids = b("TopK", choice, b.constant(np.array([K])), outputs=2)
    weights = b("GatherElements", scores, ids, axis=1) if selection or groups else values
    if scoring == "softmax_after_topk":
        weights = b("Softmax", weights, axis=-1)
    if renormalize:
        weights = b("Div", weights, b("ReduceSum", weights, b.constant(np.array([-1])), keepdims=1))
    return b.fit(ids, b("Mul", weights, b.constant(np.float32(scale))))


def _masked(b, choice, groups, kept, score):
    split = b("Reshape", choice, b.constant(np.array([-1, groups, E // groups])))
    best = b("TopK", split, b.constant(np.array([2 if score == "top2" else 1])), outputs=2)[0]
    score = b("ReduceSum", best, b.constant(np.array([2])), keepdims=0)
    chosen = b("TopK", score, b.constant(np.array([kept])), outputs=2)[1]
    ones = b(
        "OneHot", chosen, b.constant(np.array(groups)), b.constant(np.array([0, 1], np.float32)), axis=-1
    )
    mask = b("ReduceMax", ones, b.constant(np.array([1])), keepdims=0)
    mask = b("Unsqueeze", mask, b.constant(np.array([2])))
    blocked = b("Where", b("Cast", mask, to=9), split, b.constant(np.float32(-1e30)))
    return b("Reshape", blocked, b.constant(np.array([-1, E])))


CASES = [
    (s, r, b, c, scale)
    for s, r, b, c, scale in itertools.product(
        ("softmax", "sigmoid", "softmax_after_topk"), (False, True), (False, True), (False, True), (1.0, 2.5)
    )
    if not (s == "softmax_after_topk" and r)
]


@pytest.mark.parametrize(("scoring", "renormalize", "bias", "selection", "scale"), CASES)
def test_every_member_of_the_family(scoring, renormalize, bias, selection, scale):
    fit = _router(scoring, renormalize, bias, selection, scale)
    assert not isinstance(fit, str), fit
    if scoring == "softmax_after_topk" and not selection:  # the same function
        scoring, renormalize = "softmax", True
    assert (fit.config.scoring, fit.config.renormalize) == (scoring, renormalize)
    assert fit.config.routed_scale == pytest.approx(scale, rel=1e-5)
    assert (fit.config.num_experts, fit.config.top_k, fit.config.num_groups) == (E, K, 1)
    assert fit.weight.name == "gate.weight"
    assert (fit.bias and fit.bias.name) == ("gate.bias" if bias else None)
    assert (fit.selection_bias and fit.selection_bias.name) == ("correction" if selection else None)


@pytest.mark.parametrize("groups", [(4, 2, "top2"), (4, 2, "max"), (8, 3, "top2"), (2, 1, "max")])
@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_groups(scoring, groups):
    fit = _router(scoring, True, False, scoring == "sigmoid", 2.5, groups)
    assert not isinstance(fit, str), fit
    config = fit.config
    assert (config.num_groups, config.topk_groups, config.group_score) == groups
    assert (config.scoring, config.renormalize) == (scoring, True)


def test_another_function_is_not_forced():
    b = _Build()
    logits = b("MatMul", b.x, b("Transpose", b.parameter("gate.weight", E, H), perm=[1, 0]))
    values, ids = b("TopK", b("Tanh", logits), b.constant(np.array([K])), outputs=2)
    fit = b.fit(ids, values)
    assert isinstance(fit, str)
    assert "Tanh" in fit


def test_router_without_a_matrix():
    b = _Build()
    values, ids = b("TopK", b.x, b.constant(np.array([K])), outputs=2)
    assert "0 matrices" in b.fit(ids, values)
