"""Runs one moec operator in ONNX Runtime with libmoec_cpu, state in place by IOBinding."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import numpy as np
import onnx
import onnxruntime as ort

from moec.dialect.operators import OPS
from moec.native import cpu_library
from tests.helpers.single_op import single_op_model


def cpu_session(model: onnx.ModelProto, threads: int) -> ort.InferenceSession:
    """A CPU session with our operators, as the runtime makes it."""
    options = ort.SessionOptions()
    options.intra_op_num_threads, options.inter_op_num_threads = threads, 1
    options.log_severity_level = 3
    options.register_custom_ops_library(str(cpu_library()))
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


class CpuOp:
    """Calls an operator like its reference; with `in_place=True` the state arrays themselves are updated."""

    def __init__(self, op: str, threads: int = 1, **attributes: object) -> None:
        self.op, self.threads, self.session = op, threads, None
        self.attributes = OPS[op].complete(attributes)
        self.state = {t.name: t.alias_of for t in OPS[op].outputs if t.alias_of}

    def __call__(self, *, in_place: bool = False, **inputs: np.ndarray) -> list[np.ndarray]:
        if self.session is None:
            model = single_op_model(self.op, inputs, self.attributes)
            self.session = cpu_session(model, self.threads)
        if not in_place:
            return self.session.run(None, inputs)
        return self._bound(inputs)

    def _bound(self, inputs: dict[str, np.ndarray]) -> list[np.ndarray]:
        binding = self.session.io_binding()
        values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        for output in self.session.get_outputs():
            if output.name in self.state:
                binding.bind_ortvalue_output(output.name, values[self.state[output.name]])
            else:
                binding.bind_output(output.name)
        self.session.run_with_iobinding(binding)
        results = binding.get_outputs()
        for output, value in zip(self.session.get_outputs(), results, strict=True):
            if output.name in self.state:
                assert value.data_ptr() == values[self.state[output.name]].data_ptr()
        return [value.numpy() for value in results]


def run_with_isa(isa: str, code: str) -> dict:
    """Runs Python code in a child process whose kernels are `isa`; the code prints one JSON object."""
    environment = {**os.environ, "MOEC_CPU_ISA": isa, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
