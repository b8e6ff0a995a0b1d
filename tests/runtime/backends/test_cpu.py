"""The CPU backend on a toy graph of standard operators: state in place, padding, errors."""

from itertools import product

import numpy as np
import onnxruntime as ort
import pytest

from moec.errors import MoecError
from moec.runtime.backends.cpu import CpuBackend, even_shape
from tests.helpers.toy_model import WIDTH, ToyModel, toy_graph

BATCH, CONTEXT, VOCAB = 3, 40, 50


@pytest.fixture
def model(seed):
    return ToyModel(VOCAB, seed)


@pytest.fixture
def backend(tmp_path, model):
    return open_toy(tmp_path, model)


def open_toy(tmp_path, model, batch=BATCH, **constants):
    constants = {"kv.0.k_mean": np.zeros(WIDTH, np.float32)} | constants
    path = toy_graph(tmp_path / "model.onnx", model, batch, CONTEXT)
    return CpuBackend(path, constants, context=CONTEXT, threads=1)


def test_chunks_rows_and_slots_give_the_closed_form(backend, model, rng):
    """Random chunks in random slots, several rows a step, odd and even: logits are those of the history."""
    history = [[] for _ in range(BATCH)]
    for _ in range(12):
        rows = rng.permutation(BATCH)[: rng.integers(1, BATCH + 1)]
        counts = [int(rng.integers(1, 4)) for _ in rows]
        ids = rng.integers(0, VOCAB, (len(rows), max(counts)))
        logits = backend.step(ids, list(rows), counts)
        for row, (slot, count) in enumerate(zip(rows, counts, strict=True)):
            history[slot] += list(ids[row, :count])
            np.testing.assert_allclose(logits[row], model.logits(history[slot]), rtol=1e-4, atol=1e-4)
    assert list(backend.lengths) == [len(h) for h in history]


def test_state_is_updated_in_place(backend):
    """No copy of the cache: the array that was allocated at load holds the tokens afterwards."""
    ring = backend._state["kv.0.ring"]
    assert backend._values["kv.0.ring"].data_ptr() == ring.ctypes.data
    assert not ring.any()
    backend.step(np.array([[1, 2, 3]]), [1], [3])
    assert ring[1, 0, :3].any(axis=-1).all()
    assert not ring[1, 0, 3:CONTEXT].any()
    assert backend.cache_bytes == ring.nbytes


def test_reset_slot_starts_anew(backend, model, rng):
    first, second = rng.integers(0, VOCAB, (2, 5))
    backend.step(first[None], [0], [5])
    backend.set_length(0, 0)
    np.testing.assert_allclose(
        backend.step(second[None], [0], [5])[0], model.logits(second), rtol=1e-4, atol=1e-4
    )


def test_logits_belong_to_the_caller(backend):
    first = backend.step(np.array([[1]]), [0], [1])
    copy = first.copy()
    backend.step(np.array([[2]]), [0], [1])
    np.testing.assert_array_equal(first, copy)


def test_overrun_is_refused_and_changes_nothing(backend, rng):
    backend.step(rng.integers(0, VOCAB, (1, CONTEXT)), [0], [CONTEXT])
    with pytest.raises(MoecError, match="cannot hold 41 tokens, only 40"):
        backend.step(np.array([[1]]), [0], [1])
    assert list(backend.lengths) == [CONTEXT, 0, 0]


def test_failed_run_keeps_lengths_and_is_a_clean_error(backend):
    with pytest.raises(MoecError, match="indices element out of data bounds") as caught:
        backend.step(np.array([[VOCAB + 7]]), [0], [1])
    assert "ONNXRuntimeError" not in str(caught.value)
    assert backend.lengths[0] == 0


@pytest.mark.parametrize(
    ("constants", "message"),
    [({"kv.0.k_mean": np.zeros(3, np.float32)}, r"float32 \[3\].*wants float32 \[16\]")],
)
def test_constant_of_the_wrong_shape(tmp_path, model, constants, message):
    with pytest.raises(MoecError, match=message):
        open_toy(tmp_path, model, **constants)


def test_missing_constant(tmp_path, model):
    path = toy_graph(tmp_path / "model.onnx", model, BATCH, CONTEXT)
    with pytest.raises(MoecError, match=r"kv\.0\.k_mean has no value"):
        CpuBackend(path, {}, context=CONTEXT)


def test_constants_are_bound_without_a_copy(tmp_path, model):
    mean = np.memmap(tmp_path / "mean", np.float32, "w+", shape=(WIDTH,))
    backend = open_toy(tmp_path, model, **{"kv.0.k_mean": mean})
    assert backend._values["kv.0.k_mean"].data_ptr() == mean.ctypes.data


def test_damaged_graph_is_a_clean_error(tmp_path):
    (tmp_path / "model.onnx").write_bytes(b"not a graph")
    with pytest.raises(MoecError, match="cannot load the graph"):
        CpuBackend(tmp_path / "model.onnx", {}, context=8)


def test_options_of_the_session(backend):
    options = backend._session.get_session_options()
    assert options.get_session_config_entry("session.force_spinning_stop") == "1"
    assert int(options.get_session_config_entry("session.intra_op.spin_duration_us")) <= 50
    assert backend._session.get_providers() == ["CPUExecutionProvider"]
    assert options.execution_mode == ort.ExecutionMode.ORT_SEQUENTIAL


def test_even_shape():
    """Always even, never smaller, an idle row only where a slot is free, the fewest tokens added."""
    for rows, positions, free in product(range(1, 9), range(1, 9), range(3)):
        new_rows, new_positions = even_shape(rows, positions, free)
        assert new_rows * new_positions % 2 == 0
        assert 0 <= new_rows - rows <= min(free, 1)
        added = new_rows * new_positions - rows * positions
        odd = rows * positions % 2
        assert added == odd * (min(rows, positions) if free else rows)


def test_full_odd_batch_decodes(tmp_path, model, rng):
    """All slots of an odd batch busy: no slot for an idle row, so positions are padded."""
    backend = open_toy(tmp_path, model)
    tokens = rng.integers(0, VOCAB, (BATCH, 1))
    logits = backend.step(tokens, [0, 1, 2], [1, 1, 1])
    for row in range(BATCH):
        np.testing.assert_allclose(logits[row], model.logits(tokens[row]), rtol=1e-4, atol=1e-4)
    assert list(backend.lengths) == [1, 1, 1]
