"""moec::FusedLinear against its reference: formats, shapes, what is fused, and what a row may depend on."""

from __future__ import annotations

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from moec import native
from moec.reference.linear import linear, round_int8
from moec.reference.weights import quantize_int4, quantize_int8
from tests.helpers.cpu_op import cpu_session, run_with_isa
from tests.helpers.rng import fresh_rng
from tests.plugins.cpu.test_dispatch import supported

pytestmark = pytest.mark.skipif(native.find_library("moec_cpu") is None, reason="libmoec_cpu is not built")
EPSILON = 1e-2
QUANTIZE = {"int4": quantize_int4, "int8": quantize_int8}


class Fused:
    """One node over constant matrices: (format, weight `[N,K]`, bias `[N]` or None) each."""

    def __init__(self, matrices, activation="none", gate=False, addends=0, norm=None, keep=False, threads=1):
        self.parts, constants, names = [], [], []
        for index, (form, weight, bias) in enumerate(matrices):
            arrays = [weight] if form == "fp32" else list(QUANTIZE[form](weight))
            self.parts.append((form, arrays, bias))
            for place, array in enumerate([*arrays, *([bias] if bias is not None else [])]):
                names.append(f"w{index}.{place}")
                constants.append(numpy_helper.from_array(array, names[-1]))
        if norm is not None:
            names.insert(0, "norm")
            constants.append(numpy_helper.from_array(norm, "norm"))
        self.activation, self.norm, self.keep = activation, norm, keep
        count = len(matrices) - (activation != "none") + keep
        extra = [*(["gate"] if gate else []), *(f"addend{i}" for i in range(addends))]
        biases = "".join("01"[bias is not None] for _, _, bias in matrices)
        outputs = [f"y{i}" for i in range(count)]
        node = helper.make_node(
            "FusedLinear", ["x", *names, *extra], outputs, domain="moec",
            activation=activation, biases=biases, gate=int(gate), addends=addends,
            norm=int(norm is not None), keep=int(keep), epsilon=EPSILON,
        )  # fmt: skip
        value = helper.make_tensor_value_info
        graph = helper.make_graph(
            [node], "g", [value(n, TensorProto.FLOAT, None) for n in ("x", *extra)],
            [value(n, TensorProto.FLOAT, None) for n in outputs], constants,
        )  # fmt: skip
        imports = [helper.make_opsetid("", 21), helper.make_opsetid("moec", 1)]
        self.session = cpu_session(helper.make_model(graph, opset_imports=imports, ir_version=10), threads)

    def __call__(self, x, gate=None, addends=()):
        feeds = {"x": x} | ({"gate": gate} if gate is not None else {})
        return self.session.run(None, feeds | {f"addend{i}": a for i, a in enumerate(addends)})

    def expected(self, x, gate=None, addends=()):
        if self.norm is not None:
            wide = x.astype(np.float64)
            x = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + EPSILON) * self.norm
            x = x.astype(np.float32)
        ys = [self._product(x, *part) for part in self.parts]
        if self.activation == "silu":
            ys[:2] = [ys[0] / (1 + np.exp(-ys[0])) * ys[1]]
        if gate is not None:
            ys[0] = ys[0] / (1 + np.exp(-gate.astype(np.float64)))
        ys[0] = ys[0] + sum(a.astype(np.float64) for a in addends)
        return ys + ([x] if self.keep else [])

    @staticmethod
    def _product(x, form, arrays, bias):
        if form != "fp32":
            return linear(x, *arrays, bias)
        return x.astype(np.float64) @ arrays[0].T.astype(np.float64) + (0 if bias is None else bias)


def _weight(rng, rows, columns):
    return rng.normal(size=(rows, columns)).astype(np.float32) / np.float32(columns**0.5)


def _check(got, want, tolerance=1e-5):
    assert len(got) == len(want)
    for y, reference in zip(got, want, strict=True):
        assert y.shape == reference.shape
        np.testing.assert_allclose(
            y, reference, atol=tolerance * np.abs(reference).max(initial=1e-25), rtol=tolerance
        )


@pytest.mark.parametrize("shape", [(1, 1), (1, 7), (3, 5), (2, 70), (0, 4)])
@pytest.mark.parametrize(("rows", "columns"), [(64, 64), (1, 100), (130, 576), (67, 40), (4200, 72)])
@pytest.mark.parametrize("form", ["int4", "int8", "fp32"])
def test_product(form, rows, columns, shape):
    rng = fresh_rng()
    bias = rng.normal(size=rows).astype(np.float32) if rows % 2 else None
    fused = Fused([(form, _weight(rng, rows, columns), bias)], threads=2)
    x = rng.normal(size=(*shape, columns)).astype(np.float32)
    _check(fused(x), fused.expected(x))


def test_everything_at_once():
    rng = fresh_rng()
    matrices = [
        ("int4", _weight(rng, 200, 128), None),
        ("int8", _weight(rng, 200, 128), rng.normal(size=200).astype(np.float32)),
        ("int8", _weight(rng, 33, 128), None),
        ("fp32", _weight(rng, 1, 128), rng.normal(size=1).astype(np.float32)),
    ]
    fused = Fused(matrices, activation="silu", gate=True, addends=2, threads=2)
    x = rng.normal(size=(2, 6, 128)).astype(np.float32)
    gate = rng.normal(size=(2, 6, 1)).astype(np.float32)
    addends = [rng.normal(size=(2, 6, 200)).astype(np.float32) for _ in range(2)]
    _check(fused(x, gate, addends), fused.expected(x, gate, addends))


@pytest.mark.parametrize("keep", [False, True])
@pytest.mark.parametrize("tokens", [1, 40])
def test_norm_before_the_products(tokens, keep):
    rng = fresh_rng()
    norm = rng.normal(size=200).astype(np.float32)
    matrices = [("int8", _weight(rng, 70, 200), None), ("fp32", _weight(rng, 3, 200), None)]
    fused = Fused(matrices, norm=norm, keep=keep, threads=2)
    x = 10 * rng.normal(size=(1, tokens, 200)).astype(np.float32)
    # The last bit of a norm may move a value over the edge between two int8 codes.
    _check(fused(x), fused.expected(x), tolerance=2e-3)
    _check(fused(x)[1:], fused.expected(x)[1:])


@pytest.mark.parametrize("form", ["int4", "int8", "fp32"])
def test_a_row_depends_on_no_other(form):
    rng = fresh_rng()
    fused = Fused([(form, _weight(rng, 150, 192), None)], threads=2)
    x = rng.normal(size=(1, 133, 192)).astype(np.float32)
    whole = fused(x)[0]
    for rows in ([0], [132], [5, 77], list(range(64)), list(range(60, 65))):
        assert np.array_equal(fused(x[:, rows])[0], whole[:, rows])


def test_numbers_that_are_not_finite_stay_visible():
    rng = fresh_rng()
    fused = Fused([("int8", _weight(rng, 10, 128), None)])
    x = rng.normal(size=(4, 128)).astype(np.float32)
    x[1, 3], x[2, 100] = np.nan, np.inf
    y = fused(x)[0]
    assert np.isfinite(y[[0, 3]]).all()
    assert np.isnan(y[[1, 2]]).all()
    assert not fused(np.zeros((1, 128), np.float32))[0].any()


def test_rounding_of_activations_is_to_half_a_step():
    x = fresh_rng().normal(size=(5, 100)).astype(np.float32)
    step = np.abs(np.pad(x, ((0, 0), (0, 28))).reshape(5, 2, 64)).max(-1) / 127
    error = np.pad(np.abs(round_int8(x) - x), ((0, 0), (0, 28))).reshape(5, 2, 64).max(-1)
    assert (error <= 0.5001 * step).all()


def test_wrong_inputs_are_refused():
    rng = fresh_rng()
    fused = Fused([("int4", _weight(rng, 10, 128), None)])
    with pytest.raises(Exception, match="do not fit"):
        fused(np.zeros((1, 192), np.float32))


CODE = """
import json, numpy as np
from tests.plugins.cpu.test_fused_linear import Fused, _check, _weight
rng = np.random.default_rng({seed})
fused = Fused([(f, _weight(rng, 70, 200), None) for f in ("int4", "int8", "fp32")])
x = rng.normal(size=(9, 200)).astype(np.float32)
_check(fused(x), fused.expected(x))
print(json.dumps({{}}))
"""


@pytest.mark.parametrize("isa", supported())
def test_every_instruction_set(isa):
    run_with_isa(isa, CODE.format(seed=int(fresh_rng().integers(1 << 30))))
