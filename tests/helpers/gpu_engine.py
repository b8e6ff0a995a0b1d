"""Runs a bundle's engine on a GPU with cuda-python: the steps of CpuBackend over the two static profiles.

Imports TensorRT and cuda-python when an engine is opened, not before.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from moec.compile.adapter import Adapter
from moec.compile.memory_plan import EngineBinding, from_json
from tests.helpers.gpu_buffers import buffer_bytes, contents, dtype_of, exchanged, owners


class Cuda:
    """The calls of cuda.bindings.runtime that are needed here; an error raises."""

    def __init__(self) -> None:
        from cuda.bindings import runtime

        self.runtime = runtime

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.runtime, name)

        def call(*arguments: Any) -> Any:
            status, *results = function(*arguments)
            if status != self.runtime.cudaError_t.cudaSuccess:
                raise RuntimeError(f"{name}: {status.name}")
            return results[0] if results else None

        return call

    def upload(self, address: int, array: np.ndarray) -> None:
        array = np.ascontiguousarray(array)
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyHostToDevice
        self.cudaMemcpy(address, array.ctypes.data, array.nbytes, kind)

    def download(self, address: int, array: np.ndarray) -> np.ndarray:
        """Fills `array`, which it returns."""
        kind = self.runtime.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self.cudaMemcpy(array.ctypes.data, address, array.nbytes, kind)
        return array


class GpuEngine:
    """A deserialized plan with all its memory.

    Args:
        folder: The bundle.
        entry: Its engine, from the manifest's `engines`.

    Attributes:
        engine: TensorRT's.
        table: The binding table, by name.
        batch, chunk: Rows of a decode step, tokens of a prefill step.
        lengths: int32 `[B]`, tokens cached in each slot.
    """

    def __init__(self, folder: Path, entry: Mapping[str, Any]) -> None:
        self.cuda, self.profiles = Cuda(), list(entry["profiles"])
        self._buffers: dict[str, int] = {}
        self._graphs: dict[str, Any] = {}
        self._adapter = Adapter(entry["module"])
        self._open(self._adapter, folder / entry["file"])
        self._allocate(folder, from_json(entry["bindings"]))
        self._contexts = {name: self._context(index) for index, name in enumerate(self.profiles)}
        for index in range(len(self.profiles)):
            self._warm_up(index)
        self.reset()

    def _open(self, adapter: Adapter, plan: Path) -> None:
        trt = adapter.trt
        self.cuda.cudaFree(0)  # makes the CUDA context
        self.stream = self.cuda.cudaStreamCreate()
        self._logger = trt.Logger(trt.Logger.WARNING)
        self._runtime = trt.Runtime(self._logger)
        self._runtime.engine_host_code_allowed = True  # the plugin library is inside the plan
        self.engine = self._runtime.deserialize_cuda_engine(plan.read_bytes())
        assert self.engine is not None, f"{plan} does not load on this GPU: see TensorRT's message above"

    def _allocate(self, folder: Path, table: Sequence[EngineBinding]) -> None:
        self.table = {binding.name: binding for binding in table}
        self._exchanged, self._owners = exchanged(table), owners(table)
        for name, size in buffer_bytes(table).items():
            self._buffers[name] = self.cuda.cudaMalloc(size)
        for name, array in contents(folder, table):
            self.cuda.upload(self._buffers[name], array)
        # One for both contexts: their steps follow each other on one stream.
        self._activations = self.cuda.cudaMalloc(max(1, self.engine.device_memory_size_v2))
        self.batch = self.table["lengths"].shapes[0][0]
        self.chunk = self.table["input_ids"].shapes[1][1]
        self.lengths = np.zeros(self.batch, np.int32)
        self.reset()

    def reset(self) -> None:
        """Empty all slots and clear every cache."""
        self.lengths[:] = 0
        for name, address in self._buffers.items():
            if self.table[name].source == "cache":
                self.cuda.cudaMemset(address, 0, self.table[name].nbytes)

    def _context(self, index: int) -> Any:
        context = self._adapter.context(self.engine)
        context.set_device_memory(int(self._activations), self.engine.device_memory_size_v2)
        assert context.set_optimization_profile_async(index, int(self.stream))
        self.cuda.cudaStreamSynchronize(self.stream)
        for binding in self.table.values():
            if self._is_input(binding.name):
                assert context.set_input_shape(binding.name, binding.shapes[index]), binding.name
        assert context.all_binding_shapes_specified
        return context

    def _warm_up(self, index: int) -> None:
        """A step of idle rows: kernels are compiled and loaded, and TensorRT's deferred work done, before a
        capture, which forbids both. It changes no slot."""
        shape = self.table["input_ids"].shapes[index]
        self._upload(padded_request(shape, np.zeros((0, 0)), (), (), self.batch))
        self._enqueue(self.profiles[index])
        self.cuda.cudaStreamSynchronize(self.stream)

    def _upload(self, request: Mapping[str, np.ndarray]) -> None:
        for name, array in {**request, "lengths": self.lengths}.items():
            self.cuda.upload(self._buffers[name], array)

    def _is_input(self, name: str) -> bool:
        return self.engine.get_tensor_mode(name).name == "INPUT"

    def step(
        self, input_ids: np.ndarray, slot_ids: Sequence[int], num_tokens: Sequence[int], graph: bool = False
    ) -> np.ndarray:
        """Appends tokens to slots; see CpuBackend.step. `b` and `S` must be those of a profile, or fewer.

        Args:
            graph: Replay the profile's captured CUDA graph (captured at the first such call).

        Returns:
            float32 `[b,V]`.
        """
        rows, positions = np.shape(input_ids)
        profile = 0 if positions == 1 else 1
        request = padded_request(
            self.table["input_ids"].shapes[profile], input_ids, slot_ids, num_tokens, self.batch
        )
        self._upload(request)
        self._run(self.profiles[profile], graph)
        self.lengths[list(slot_ids)] += np.asarray(num_tokens, np.int32)
        return self.read("logits", profile)[:rows]

    def read(self, name: str, profile: int = 0) -> np.ndarray:
        """A copy of a tensor's present contents."""
        binding = self.table[name]
        array = np.empty(binding.shapes[profile], dtype_of(binding))
        return self.cuda.download(self._buffers[self._owners[name]], array)

    def _run(self, profile: str, graph: bool) -> None:
        if graph:
            assert not self._exchanged, "a graph keeps its addresses: recurrent states would need two"
            self.cuda.cudaGraphLaunch(self._graph(profile), self.stream)
        else:
            self._enqueue(profile)
        self.cuda.cudaStreamSynchronize(self.stream)
        for state, out in self._exchanged:
            self._buffers[state], self._buffers[out] = self._buffers[out], self._buffers[state]

    def _enqueue(self, profile: str) -> None:
        context = self._contexts[profile]
        for name in self.table:
            assert context.set_tensor_address(name, int(self._buffers[self._owners[name]])), name
        assert context.execute_async_v3(int(self.stream)), "TensorRT refuses the step: see its message above"

    def _graph(self, profile: str) -> Any:
        """The profile's graph."""
        if profile not in self._graphs:
            context = self._contexts[profile]
            assert not self._adapter.is_rtx or context.is_stream_capturable(int(self.stream))
            mode = self.cuda.runtime.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
            self.cuda.cudaStreamBeginCapture(self.stream, mode)
            self._enqueue(profile)
            graph = self.cuda.cudaStreamEndCapture(self.stream)
            self._graphs[profile] = self.cuda.cudaGraphInstantiate(graph, 0)
            self.cuda.cudaGraphDestroy(graph)
        return self._graphs[profile]

    def close(self) -> None:
        """Give all device memory back."""
        for graph in self._graphs.values():
            self.cuda.cudaGraphExecDestroy(graph)
        self._contexts.clear()
        for address in (*self._buffers.values(), self._activations):
            self.cuda.cudaFree(address)
        self._graphs.clear()
        self._buffers.clear()
        self.cuda.cudaStreamDestroy(self.stream)


def padded_request(
    shape: tuple[int, int],
    input_ids: np.ndarray,
    slot_ids: Sequence[int],
    num_tokens: Sequence[int],
    batch: int,
) -> dict[str, np.ndarray]:
    """The request tensors of one step at a profile's `(b, S)`: missing rows are idle, in free slots."""
    (b, s), (rows, positions) = shape, np.shape(input_ids)
    if rows > b or positions > s:
        raise ValueError(f"a step of {rows} x {positions} tokens does not fit a profile of {b} x {s}")
    free = [slot for slot in range(batch) if slot not in slot_ids]
    ids = np.zeros((b, s), np.int32)
    ids[:rows, :positions] = input_ids
    return {
        "input_ids": ids,
        "slot_ids": np.array([*slot_ids, *free[: b - rows]], np.int32),
        "num_tokens": np.array([*num_tokens, *[0] * (b - rows)], np.int32),
    }
