"""Runs a bundle's graph on the CPU: ONNX Runtime with libmoec_cpu, caches updated in place.

The state inputs (`kv.*.blocks`, `kv.*.ring`, `state.*` of recurrent layers) and their outputs are bound to
the same memory, so a step copies no cache. ONNX Runtime's matrix products give a row the same bits whatever
rows are beside it only if the number of rows is even. Runs of graphs that have such products (those without
the mark of moec.rewrite.independent) are padded to an even number, with an idle row or a padding token.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime as ort

from moec.errors import MoecError
from moec.runtime.backends.ort_errors import load_error, run_error
from moec.runtime.cpu_info import physical_cores

_STEP_INPUTS = ("input_ids", "slot_ids", "num_tokens", "lengths")
_NUMPY_TYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int8)": np.int8,
    "tensor(uint8)": np.uint8,
    "tensor(int32)": np.int32,
}
_INDEPENDENT = "moec.independent_rows"
_CACHED_POSITIONS = 2  # bindings of decode-sized runs are kept
# For ONNX Runtime's own operators; ours have their own threads (plugins/cpu/team.h), which sleep 50 us after
# the last of them. Within a run a thread waits 20 us before it sleeps: the next product is a few us away, and
# waking it costs more. At 1024 tokens, when all operators used these: 8.4 -> 6.0 ms a token on two cores.
_SPINNING = {
    "session.intra_op.allow_spinning": "1",
    "session.intra_op.spin_duration_us": "20",
    "session.force_spinning_stop": "1",
}


@dataclass
class _Bound:
    """An IOBinding for one shape of run, with the arrays that its step inputs and its logits live in."""

    binding: ort.IOBinding
    input_ids: np.ndarray
    slot_ids: np.ndarray
    num_tokens: np.ndarray
    logits: np.ndarray

    def fill(
        self, input_ids: np.ndarray, slot_ids: Sequence[int], num_tokens: Sequence[int], free: Sequence[int]
    ) -> None:
        """Sets the step inputs; what this binding has beyond them becomes padding and an idle row."""
        rows, positions = np.shape(input_ids)
        self.input_ids.fill(0)
        self.input_ids[:rows, :positions] = input_ids
        self.slot_ids[:rows], self.num_tokens[:rows] = slot_ids, num_tokens
        self.slot_ids[rows:], self.num_tokens[rows:] = free[: len(self.slot_ids) - rows], 0


class CpuBackend:
    """A loaded graph with its state.

    Args:
        model: `model.onnx`, with its external data beside it.
        constants: Arrays for graph inputs that are neither state nor step inputs (calibration, expert
            stores); bound without a copy.
        context: Tokens a slot can hold.
        library: libmoec_cpu, or None if the graph has only standard operators.
        threads: Threads that an operator may use; None takes every physical core.

    Attributes:
        batch: Slots B.
        vocab_size: V.
        lengths: int32 `[B]`, tokens cached in each slot.

    Raises:
        MoecError: The graph does not load or lacks an input.
    """

    def __init__(
        self,
        model: Path,
        constants: Mapping[str, np.ndarray],
        *,
        context: int,
        library: Path | None = None,
        threads: int | None = None,
    ) -> None:
        self._path, self._library = model, library
        self._threads = threads or physical_cores()
        self._session = self._create(str(model))
        self._all_session: ort.InferenceSession | None = None
        self._independent = self._session.get_modelmeta().custom_metadata_map.get(_INDEPENDENT) == "1"
        self.context = context
        shapes = {entry.name: entry for entry in self._session.get_inputs()}
        self.batch = int(shapes["lengths"].shape[0])
        self.vocab_size = int(self._session.get_outputs()[0].shape[-1])
        self.lengths = np.zeros(self.batch, np.int32)
        self._state = self._allocate_state()
        self._arrays = self._collect(constants)
        self._values = {name: ort.OrtValue.ortvalue_from_numpy(a) for name, a in self._arrays.items()}
        self._bound: dict[tuple[int, int], _Bound] = {}

    @property
    def recurrent(self) -> bool:
        """Whether a slot has states that cannot be set back to fewer tokens, only emptied."""
        return any(name.startswith("state.") for name in self._state)

    @property
    def cache_bytes(self) -> int:
        """Bytes allocated for the caches of all slots."""
        return sum(array.nbytes for array in self._state.values())

    def set_length(self, slot: int, length: int) -> None:
        """Forgets all but the first `length` tokens of a slot; 0 empties it."""
        self.lengths[slot] = length

    def step(self, input_ids: np.ndarray, slot_ids: Sequence[int], num_tokens: Sequence[int]) -> np.ndarray:
        """Appends tokens to slots and returns the logits after the last one of each row.

        Args:
            input_ids: int `[b,S]`, padded on the right.
            slot_ids: The slot of each row, no two alike.
            num_tokens: Valid tokens of each row.

        Returns:
            float32 `[b,V]`, the caller's own.

        Raises:
            MoecError: A slot would exceed the context, or an operator failed; `lengths` is unchanged then.
        """
        return self._run(self._session, input_ids, slot_ids, num_tokens)

    def step_all(
        self, input_ids: np.ndarray, slot_ids: Sequence[int], num_tokens: Sequence[int]
    ) -> np.ndarray:
        """The same with the logits of every position, float32 `[b,S,V]`; first use loads a second graph."""
        if self._all_session is None:
            self._all_session = self._create(_all_logits(self._path))
        return self._run(self._all_session, input_ids, slot_ids, num_tokens)

    def _run(
        self,
        session: ort.InferenceSession,
        input_ids: np.ndarray,
        slot_ids: Sequence[int],
        num_tokens: Sequence[int],
    ) -> np.ndarray:
        rows, positions = np.shape(input_ids)
        self._check_room(slot_ids, num_tokens)
        free = [slot for slot in range(self.batch) if slot not in slot_ids]
        shape = (rows, positions) if self._independent else even_shape(rows, positions, len(free))
        bound = self._bind(session, *shape)
        bound.fill(input_ids, slot_ids, num_tokens, free)
        try:
            session.run_with_iobinding(bound.binding)
        except Exception as error:  # ONNX Runtime has no common base class
            raise run_error(error, str(self._path.parent)) from error
        self.lengths[bound.slot_ids] += bound.num_tokens
        logits = bound.logits[:rows] if bound.logits.ndim == 2 else bound.logits[:rows, :positions]
        return logits.copy()

    def _check_room(self, slot_ids: Sequence[int], num_tokens: Sequence[int]) -> None:
        for slot, count in zip(slot_ids, num_tokens, strict=True):
            if self.lengths[slot] + count > self.context:
                raise MoecError(
                    f"Slot {slot} cannot hold {self.lengths[slot] + count} tokens, only {self.context}"
                )

    def _create(self, model: str | bytes) -> ort.InferenceSession:
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._threads
        options.inter_op_num_threads = 1
        options.log_severity_level = 4  # errors come as exceptions
        for entry, value in _SPINNING.items():
            options.add_session_config_entry(entry, value)
        options.add_session_config_entry(
            "session.model_external_initializers_file_folder_path", str(self._path.parent)
        )
        try:
            if self._library is not None:
                options.add_session_config_entry("moec.threads", str(self._threads))
                options.register_custom_ops_library(str(self._library))
            return ort.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # ONNX Runtime has no common base class
            raise load_error(error, str(self._path)) from error

    def _allocate_state(self) -> dict[str, np.ndarray]:
        outputs = {entry.name for entry in self._session.get_outputs()}
        return {
            entry.name: np.zeros(entry.shape, _NUMPY_TYPES[entry.type])
            for entry in self._session.get_inputs()
            if f"{entry.name}.out" in outputs
        }

    def _collect(self, constants: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """One array for every graph input that keeps its memory for good."""
        arrays = {"lengths": self.lengths, **self._state}
        for entry in self._session.get_inputs():
            if entry.name in arrays or entry.name in _STEP_INPUTS:
                continue
            arrays[entry.name] = _matching(constants, entry, self._path)
        return arrays

    def _bind(self, session: ort.InferenceSession, rows: int, positions: int) -> _Bound:
        keep = session is self._session and positions <= _CACHED_POSITIONS
        key = rows, positions
        if keep and key in self._bound:
            return self._bound[key]
        bound = self._new_binding(session, rows, positions)
        if keep:
            self._bound[key] = bound
        return bound

    def _new_binding(self, session: ort.InferenceSession, rows: int, positions: int) -> _Bound:
        dims = (rows,) if session is self._session else (rows, positions)
        arrays = {
            "input_ids": np.zeros((rows, positions), np.int32),
            "slot_ids": np.zeros(rows, np.int32),
            "num_tokens": np.zeros(rows, np.int32),
        }
        logits = np.zeros((*dims, self.vocab_size), np.float32)
        binding = session.io_binding()
        for name, array in arrays.items():
            binding.bind_ortvalue_input(name, ort.OrtValue.ortvalue_from_numpy(array))
        for name, value in self._values.items():
            binding.bind_ortvalue_input(name, value)
        for name in self._state:
            binding.bind_ortvalue_output(f"{name}.out", self._values[name])
        binding.bind_ortvalue_output("logits", ort.OrtValue.ortvalue_from_numpy(logits))
        return _Bound(binding, *arrays.values(), logits)


def even_shape(rows: int, positions: int, free_slots: int) -> tuple[int, int]:
    """(rows, positions) with an even product, the cheaper way: an idle row, or a padding token in each row.

    The idle row needs a slot that no other row of the run uses.
    """
    if rows * positions % 2 == 0:
        return rows, positions
    if free_slots and positions <= rows:
        return rows + 1, positions
    return rows, positions + 1


def _matching(constants: Mapping[str, np.ndarray], entry: ort.NodeArg, path: Path) -> np.ndarray:
    """The constant for a graph input, checked against what the graph declares."""
    if entry.name not in constants:
        raise MoecError(f"The graph's input {entry.name} has no value in the bundle", where=str(path))
    array = constants[entry.name]
    expected = tuple(entry.shape), np.dtype(_NUMPY_TYPES[entry.type])
    if (array.shape, array.dtype) != expected:
        found = f"{array.dtype} {list(array.shape)}"
        raise MoecError(
            f"{entry.name} is {found}, the graph wants {expected[1]} {list(expected[0])}", where=str(path)
        )
    return np.ascontiguousarray(array)


def _all_logits(path: Path) -> bytes:
    import onnx_ir

    from moec.rewrite.graph_edit import all_logits

    model = onnx_ir.load(path)
    return onnx_ir.to_proto(all_logits(model) or model).SerializeToString()
