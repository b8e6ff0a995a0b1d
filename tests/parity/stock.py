"""Teacher-forced runs of a graph in stock ONNX Runtime: no custom operators, state in separate buffers."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np
import onnxruntime as ort

TYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int8)": np.int8}


class StockSession:
    """A graph of one slot whose states are every input X with an output "X.out".

    Args:
        path: The .onnx file.
        constants: Inputs that never change (calibration, expert blobs).
    """

    def __init__(self, path: Path, constants: Mapping[str, np.ndarray] | None = None) -> None:
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.log_severity_level = 3  # TensorScatter warns at every step that it copies the cache
        self._session = ort.InferenceSession(str(path), options, ["CPUExecutionProvider"])
        self._outputs = [output.name for output in self._session.get_outputs()]
        inputs = {i.name: i for i in self._session.get_inputs()}
        self._constants = {name: value for name, value in (constants or {}).items() if name in inputs}
        self._states = {name: _zeros(inputs[name]) for name in inputs if f"{name}.out" in self._outputs}

    def score(self, tokens: list[int], chunks: list[int]) -> np.ndarray:
        """Logits of every token, float32 [S,V], fed in chunks of these sizes into an empty cache."""
        assert sum(chunks) == len(tokens)
        states = {name: value.copy() for name, value in self._states.items()}
        parts, done = [], 0
        for size in chunks:
            feeds = self._constants | states | _step(tokens[done : done + size], done)
            result = dict(zip(self._outputs, self._session.run(None, feeds), strict=True))
            states = {name: result[f"{name}.out"] for name in states}
            parts.append(result["logits"][0])
            done += size
        return np.concatenate(parts)


def _step(tokens: list[int], length: int) -> dict[str, np.ndarray]:
    return {
        "input_ids": np.array([tokens], np.int32),
        "slot_ids": np.zeros(1, np.int32),
        "lengths": np.array([length], np.int32),
        "num_tokens": np.array([len(tokens)], np.int32),
    }


def _zeros(value: ort.NodeArg) -> np.ndarray:
    return np.zeros(value.shape, TYPES[value.type])
