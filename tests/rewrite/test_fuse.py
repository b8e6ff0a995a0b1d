"""Fused graphs compute what the unfused ones do, with fewer nodes; what does not fit stays as it is."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import pytest

from moec import native
from moec.rewrite import PASSES, dense, run
from moec.rewrite.fuse import lower_fused
from moec.rewrite.linear import Linear, read
from tests.helpers.built import build_graph
from tests.helpers.captured import ALL_FAMILIES, captured, checkpoint
from tests.helpers.graphs import Stepper, random_texts, session, two_slots
from tests.rewrite.test_pipeline import context, needs_library

UNFUSED = tuple(p for p in PASSES if p.name not in ("fuse", "rank"))


@needs_library
@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_the_same_logits(family, tmp_path, monkeypatch):
    """With fp32 weights: where activations become int8, the last bit of a norm moves some by a step."""
    monkeypatch.setattr(dense, "MIN_ROWS", 1 << 30)
    texts, logits = None, []
    for name, passes in (("fused", PASSES), ("unfused", UNFUSED)):
        built = build_graph(
            checkpoint(family), tmp_path / name, captured=captured(family), weights="int4", passes=passes
        )
        texts = texts or random_texts(11, built.geometry)
        stepper = Stepper(session(built.save("n.onnx"), native.cpu_library()), built.constants)
        logits.append(two_slots(stepper, *texts))
    for got, want in zip(*logits, strict=True):
        np.testing.assert_allclose(got, want, atol=1e-5 * np.abs(want).max())


def test_nodes_of_a_layer():
    model = captured("qwen2_moe").model.clone()
    run(model, context("qwen2_moe"))
    kinds = Counter(n.op_type for n in model.graph)
    layers = 2
    assert kinds["FusedLinear"] == 4 * layers + 1
    assert kinds["RMSNormalization"] == 1  # the last one: only the last token's is multiplied with the head
    assert not {"MatMul", "MatMulNBits", "Sigmoid"} & set(kinds)
    names = [sorted(w[0].name.split(".")[-3] for w, _ in read(n).matrices if len(w) == 2)
             for n in model.graph if n.op_type == "FusedLinear"]  # fmt: skip
    assert names.count(["k_proj", "q_proj", "v_proj"]) == layers
    assert names.count(["gate_proj", "up_proj"]) == layers
    down = [read(n) for n in model.graph if n.op_type == "FusedLinear" and read(n).gate is not None]
    assert [len(linear.addends) for linear in down] == [2] * layers
    normed = [read(n) for n in model.graph if n.op_type == "FusedLinear" and read(n).norm is not None]
    assert [linear.keep for linear in normed] == [False, True] * layers  # the experts read it too


def _value(name, *shape):
    return ir.Value(name=name, type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape(shape))


def _weight(name, rows):
    codes = ir.Value(name=name, type=ir.TensorType(ir.DataType.UINT8), shape=ir.Shape((rows, 1, 32)))
    scales = ir.Value(name=name + ".s", type=ir.TensorType(ir.DataType.FLOAT16), shape=ir.Shape((rows, 1)))
    return codes, scales


class Toy:
    """x times two matrices and what a test adds."""

    def __init__(self):
        self.x, self.nodes = _value("x", "b", "S", 64), []
        self.inputs = [self.x]
        self.a, self.b = self.linear("a", 8), self.linear("b", 8)

    def linear(self, name, rows):
        y = _value(name, "b", "S", rows)
        self.nodes.append(Linear(self.x, [(_weight(name + ".w", rows), None)]).node([y]))
        return y

    def op(self, op_type, *inputs, last=8):
        node = ir.node(op_type, list(inputs), outputs=[_value(f"{op_type}{len(self.nodes)}", "b", "S", last)])
        self.nodes.append(node)
        return node.outputs[0]

    def fused(self, *outputs):
        weights = [w for n in self.nodes if n.op_type == "FusedLinear" for w in n.inputs[1:]]
        graph = ir.Graph(
            self.inputs, list(outputs), nodes=self.nodes, initializers=weights, opset_imports={"": 24}
        )
        lower_fused(ir.Model(graph, ir_version=10), None, [])
        return [n for n in graph]


@pytest.mark.parametrize("swapped", [False, True])
def test_silu_times_up(swapped):
    toy = Toy()
    gate = toy.op("Mul", toy.op("Sigmoid", toy.a), toy.a)
    nodes = toy.fused(toy.op("Mul", *((toy.b, gate) if swapped else (gate, toy.b))))
    assert [n.op_type for n in nodes] == ["FusedLinear"]
    linear = read(nodes[0])
    assert linear.activation == "silu"
    assert [w[0].name for w, _ in linear.matrices] == ["a.w", "b.w"]


def test_an_activation_that_something_else_reads_stays():
    toy = Toy()
    gate = toy.op("Mul", toy.op("Sigmoid", toy.a), toy.a)
    nodes = toy.fused(toy.op("Mul", gate, toy.b), gate)
    assert [n.op_type for n in nodes] == ["FusedLinear", "Sigmoid", "Mul", "Mul"]


def test_gelu_knows_its_approximation():
    toy = Toy()
    node = ir.node("Gelu", [toy.a], {"approximate": "tanh"}, outputs=[_value("g", "b", "S", 8)])
    toy.nodes.append(node)
    nodes = toy.fused(toy.op("Mul", node.outputs[0], toy.b))
    assert read(nodes[0]).activation == "gelu_tanh"


def test_gate_and_sums():
    toy = Toy()
    g, r1, r2 = _value("g", "b", "S", 1), _value("r1", "b", "S", 8), _value("r2", "b", "S", 8)
    toy.inputs += [g, r1, r2]
    y = toy.op("Mul", toy.op("Sigmoid", g, last=1), toy.a)
    nodes = toy.fused(toy.op("Add", r2, toy.op("Add", y, r1)), toy.b)
    assert [n.op_type for n in nodes] == ["FusedLinear", "FusedLinear"]
    linear = next(read(n) for n in nodes if len(n.inputs) > 3)
    assert linear.gate is g
    assert linear.addends == (r1, r2)


def test_a_sum_that_broadcasts_stays():
    toy = Toy()
    row = _value("r", 1, 1, 8)
    toy.inputs.append(row)
    assert [n.op_type for n in toy.fused(toy.op("Add", toy.a, row), toy.b)] == ["FusedLinear", "Add"]


def test_a_product_of_two_products_stays():
    toy = Toy()
    assert [n.op_type for n in toy.fused(toy.op("Mul", toy.a, toy.b))] == ["FusedLinear", "Mul"]


def test_an_output_of_the_graph_keeps_its_name():
    toy = Toy()
    nodes = toy.fused(toy.a, toy.b)
    assert [v.name for v in nodes[0].outputs] == ["a", "b"]
    assert all(v.is_graph_output() for v in nodes[0].outputs)


def _norm(toy, x, size=64, **attributes):
    weight = _value("norm", size)
    toy.inputs.append(weight)
    node = ir.node("RMSNormalization", [x, weight], attributes, outputs=[_value("n", "b", "S", 64)])
    toy.nodes.insert(0, node)
    return node.outputs[0]


@pytest.mark.parametrize("read_twice", [False, True])
def test_a_norm_joins_its_products(read_twice):
    toy = Toy()
    raw = _value("raw", "b", "S", 64)
    toy.inputs.append(raw)
    y = _norm(toy, raw, epsilon=1e-3)
    for node in toy.nodes[1:]:
        node.replace_input_with(0, y)
    outputs = [toy.op("Relu", y, last=64)] if read_twice else []
    (linear, *rest) = toy.fused(toy.a, toy.b, *outputs)
    found = read(linear)
    assert found.x is raw
    assert found.norm.name == "norm"
    assert found.epsilon == pytest.approx(1e-3)
    assert found.keep == read_twice
    assert [n.op_type for n in rest] == (["Relu"] if read_twice else [])
    assert [v.name for v in linear.outputs] == ["a", "b", *(["n"] if read_twice else [])]


def test_a_norm_over_other_axes_stays():
    toy = Toy()
    y = _norm(toy, toy.x, axis=1)
    for node in toy.nodes[1:]:
        node.replace_input_with(0, y)
    assert [n.op_type for n in toy.fused(toy.a, toy.b)] == ["RMSNormalization", "FusedLinear"]
