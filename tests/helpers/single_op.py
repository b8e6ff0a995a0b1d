"""Runs one moec operator in stock ONNX Runtime through its generated function body."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper

from moec.dialect.functions import attach
from moec.dialect.operators import DOMAIN, OPS

_KINDS = {
    "float": TensorProto.FLOAT,
    "float16": TensorProto.FLOAT16,
    "int8": TensorProto.INT8,
    "int32": TensorProto.INT32,
}
_SYMBOLS = {"b", "S", "T"}


def single_op_model(op: str, inputs: dict[str, np.ndarray], attributes: dict) -> onnx.ModelProto:
    """A model of one node; dimensions named b, S, T are symbolic, the others as in `inputs`."""
    declaration = OPS[op]

    def info(tensor, array):
        kind = helper.np_dtype_to_tensor_dtype(array.dtype) if array is not None else _KINDS[tensor.types[0]]
        fixed = array.shape if array is not None else [None] * len(tensor.shape)
        dims = [d if d in _SYMBOLS else n for d, n in zip(tensor.shape, fixed, strict=True)]
        return helper.make_tensor_value_info(tensor.name, kind, dims)

    names = [tensor.name for tensor in declaration.inputs]
    outs = [info(t, inputs[t.alias_of] if t.alias_of else None) for t in declaration.outputs]
    node = helper.make_node(op, names, [t.name for t in declaration.outputs], op, domain=DOMAIN, **attributes)
    graph = helper.make_graph([node], "g", [info(t, inputs[t.name]) for t in declaration.inputs], outs)
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid(DOMAIN, 1)]
    return helper.make_model(graph, opset_imports=opsets, ir_version=11)


def stock_session(model: onnx.ModelProto, libraries: tuple[str, ...] = ()) -> ort.InferenceSession:
    """One-threaded CPU session, with nothing of ours unless `libraries` names custom op libraries."""
    options = ort.SessionOptions()
    options.intra_op_num_threads = options.inter_op_num_threads = 1
    options.log_severity_level = 3
    for library in libraries:
        options.register_custom_ops_library(library)
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class FunctionOp:
    """Calls an operator like its reference: `op(**inputs) -> list of arrays`; the first call fixes shapes."""

    def __init__(self, op: str, **attributes: object) -> None:
        self.op, self.attributes, self.session = op, attributes, None

    def __call__(self, **inputs: np.ndarray) -> list[np.ndarray]:
        if self.session is None:
            self.session = stock_session(attach(single_op_model(self.op, inputs, self.attributes)))
        used = {value.name for value in self.session.get_inputs()}
        return self.session.run(None, {name: array for name, array in inputs.items() if name in used})
