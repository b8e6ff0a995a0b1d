"""A language model of a dozen lines, in NumPy and as an ONNX graph with a bundle's inputs and outputs.

Logits are tanh of a decaying sum of the embeddings of all cached tokens, times a matrix: they depend on the
whole history of a slot, and on nothing else.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from moec.errors import MoecError

WIDTH, DECAY = 16, 0.7


class ToyModel:
    """Weights of the toy and its closed form."""

    def __init__(self, vocab: int, seed: int) -> None:
        rng = np.random.default_rng(seed)
        self.embedding = rng.normal(size=(vocab, WIDTH)).astype(np.float32)
        self.head = rng.normal(size=(WIDTH, vocab)).astype(np.float32)

    def logits(self, tokens: Sequence[int]) -> np.ndarray:
        """float32 `[V]` after `tokens`, in float64 arithmetic."""
        weights = DECAY ** np.arange(len(tokens) - 1, -1, -1.0)
        hidden = np.tanh(weights @ self.embedding[np.asarray(tokens)].astype(np.float64))
        return (hidden @ self.head).astype(np.float32)


class ToyBackend:
    """The scheduler's view of a device, run by `ToyModel`; keeps the history of each slot and of its calls.

    A slot that gets the token `poison` fails, like a damaged expert that only one request routes to.
    """

    recurrent = False

    def __init__(self, batch: int, context: int, vocab: int, seed: int, poison: int | None = None) -> None:
        self.batch, self.context, self.vocab_size, self.cache_bytes = batch, context, vocab, 1000
        self.model, self.poison = ToyModel(vocab, seed), poison
        self.lengths = np.zeros(batch, np.int32)
        self.history: list[list[int]] = [[] for _ in range(batch)]
        self.calls: list[tuple[list[int], list[int]]] = []  # (slots, tokens of each)

    def set_length(self, slot: int, length: int) -> None:
        self.lengths[slot] = length

    def step(self, input_ids: np.ndarray, slot_ids: Sequence[int], num_tokens: Sequence[int]) -> np.ndarray:
        return np.stack([row[count - 1] for row, count in self._rows(input_ids, slot_ids, num_tokens)])

    def step_all(
        self, input_ids: np.ndarray, slot_ids: Sequence[int], num_tokens: Sequence[int]
    ) -> np.ndarray:
        return np.stack([row for row, _ in self._rows(input_ids, slot_ids, num_tokens)])

    def _rows(self, input_ids: np.ndarray, slot_ids: Sequence[int], num_tokens: Sequence[int]) -> list:
        assert len(set(slot_ids)) == len(slot_ids), "two rows share a slot"
        self.calls.append((list(slot_ids), list(num_tokens)))
        if self.poison is not None and (np.asarray(input_ids) == self.poison).any():
            raise MoecError("experts.moex: layer 1 expert 3: checksum mismatch")
        return [
            (self._row(slot, list(ids[:count])), count)
            for slot, ids, count in zip(slot_ids, input_ids, num_tokens, strict=True)
        ]

    def _row(self, slot: int, tokens: list[int]) -> np.ndarray:
        kept = self.history[slot][: self.lengths[slot]]
        self.history[slot] = kept + tokens
        self.lengths[slot] += len(tokens)
        assert self.lengths[slot] <= self.context, "slot overrun"
        return np.stack([self.model.logits(kept + tokens[: i + 1]) for i in range(len(tokens))])


def toy_graph(path: Path, model: ToyModel, batch: int, context: int) -> Path:
    """Writes the toy as ONNX. State `kv.0.ring` f32 `[B,1,context+1,WIDTH]` (the last row takes padding);
    the constant input `kv.0.k_mean` f32 `[WIDTH]` is added to every embedding."""
    vocab = len(model.embedding)
    graph = helper.make_graph(
        [_node(*spec) for spec in _NODES],
        "toy",
        _inputs(batch, context),
        [
            helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["b", vocab]),
            helper.make_tensor_value_info("kv.0.ring.out", TensorProto.FLOAT, [batch, 1, context + 1, WIDTH]),
        ],
        [numpy_helper.from_array(array, name) for name, array in _constants(model, context).items()],
    )
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 18)], ir_version=9), path)
    return path


def _inputs(batch: int, context: int) -> list:
    integer, real = TensorProto.INT32, TensorProto.FLOAT
    return [
        helper.make_tensor_value_info("input_ids", integer, ["b", "S"]),
        helper.make_tensor_value_info("slot_ids", integer, ["b"]),
        helper.make_tensor_value_info("lengths", integer, [batch]),
        helper.make_tensor_value_info("num_tokens", integer, ["b"]),
        helper.make_tensor_value_info("kv.0.ring", real, [batch, 1, context + 1, WIDTH]),
        helper.make_tensor_value_info("kv.0.k_mean", real, [WIDTH]),
    ]


def _constants(model: ToyModel, context: int) -> dict[str, np.ndarray]:
    return {
        "embedding": model.embedding,
        "head": model.head,
        "context": np.array(context, np.int32),
        "rows": np.arange(context + 1, dtype=np.int32)[None],
        "zero": np.array(0, np.int32),
        "one": np.array(1, np.int32),
        "axis0": np.array([0], np.int64),
        "axis1": np.array([1], np.int64),
        "axis2": np.array([2], np.int64),
        "decay": np.array(DECAY, np.float32),
        "nothing": np.array(0, np.float32),
    }


# (operator, inputs, output)
_NODES = [
    ("Gather", "embedding input_ids", "embedded"),
    ("Add", "embedded kv.0.k_mean", "tokens"),
    ("Shape", "input_ids", "shape"),
    ("Gather", "shape one", "width64"),
    ("Cast32", "width64", "width"),
    ("Range", "zero width one", "offsets"),
    ("Gather", "lengths slot_ids", "starts"),
    ("Unsqueeze", "starts axis1", "starts2"),
    ("Add", "starts2 offsets", "positions"),
    ("Unsqueeze", "num_tokens axis1", "counts2"),
    ("Less", "offsets counts2", "valid"),
    ("Where", "valid positions context", "targets"),
    ("Unsqueeze", "slot_ids axis1", "slots2"),
    ("Expand", "slots2 shape", "slots"),
    ("Mul", "slots zero", "heads"),
    ("Unsqueeze", "slots axis2", "index0"),
    ("Unsqueeze", "heads axis2", "index1"),
    ("Unsqueeze", "targets axis2", "index2"),
    ("ConcatLast", "index0 index1 index2", "index32"),
    ("Cast64", "index32", "index"),
    ("ScatterND", "kv.0.ring index tokens", "kv.0.ring.out"),
    ("Gather", "kv.0.ring.out slot_ids", "cached4"),
    ("Squeeze", "cached4 axis1", "cached"),
    ("Add", "starts num_tokens", "ends1"),
    ("Sub", "ends1 one", "ends"),
    ("Unsqueeze", "ends axis1", "ends2"),
    ("Sub", "ends2 rows", "ages"),
    ("CastReal", "ages", "ages_real"),
    ("Pow", "decay ages_real", "weights"),
    ("GreaterOrEqual", "ages zero", "seen"),
    ("Where", "seen weights nothing", "masked"),
    ("Unsqueeze", "masked axis1", "masked3"),
    ("MatMul", "masked3 cached", "sums3"),
    ("Squeeze", "sums3 axis1", "sums"),
    ("Tanh", "sums", "hidden"),
    ("MatMul", "hidden head", "logits"),
]
_CASTS = {"Cast32": TensorProto.INT32, "Cast64": TensorProto.INT64, "CastReal": TensorProto.FLOAT}


def _node(operator: str, inputs: str, output: str) -> onnx.NodeProto:
    if operator in _CASTS:
        return helper.make_node("Cast", [inputs], [output], to=_CASTS[operator])
    if operator == "ConcatLast":
        return helper.make_node("Concat", inputs.split(), [output], axis=-1)
    return helper.make_node(operator, inputs.split(), [output])
