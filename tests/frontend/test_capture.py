"""Exported graphs in stock ONNX Runtime against transformers, token by token over two slots."""

from __future__ import annotations

import numpy as np
import onnx
import pytest

from moec.errors import MoecError
from moec.frontend import capture, save_exported
from tests.helpers.captured import ALL_FAMILIES, BATCH, CONTEXT, FAMILIES, captured, checkpoint
from tests.helpers.decided import decided_texts
from tests.helpers.graphs import Stepper, random_texts, reference_logits, session, two_slots


@pytest.fixture(scope="module")
def exported(tmp_path_factory):
    """family -> path of its saved exported.onnx."""
    made = {}

    def get(family: str):
        if family not in made:
            made[family] = tmp_path_factory.mktemp(family) / "exported.onnx"
            save_exported(captured(family), checkpoint(family), made[family])
        return made[family]

    return get


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_two_slots_of_unequal_length_equal_transformers(family, exported):
    stepper = Stepper(session(exported(family)))
    texts = decided_texts(family)
    model = checkpoint(family).load_torch()
    for got, text in zip(two_slots(stepper, *texts), texts, strict=True):
        np.testing.assert_allclose(got, reference_logits(model, text), atol=2e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_graph_passes_the_full_checker(family, exported):
    onnx.checker.check_model(str(exported(family)), full_check=True)


def test_contract_of_names_and_shapes():
    graph = captured("qwen2_moe").model.graph
    shapes = {
        v.name: (str(v.dtype), [d if isinstance(d, int) else d.value for d in v.shape]) for v in graph.inputs
    }
    assert shapes == {
        "input_ids": ("INT32", ["b", "S"]),
        "slot_ids": ("INT32", ["b"]),
        "lengths": ("INT32", [BATCH]),
        "num_tokens": ("INT32", ["b"]),
        **{f"kv.{i}.{n}": ("FLOAT", [BATCH, 2, CONTEXT, 64]) for i in (0, 1) for n in ("key", "value")},
    }
    assert [o.name for o in graph.outputs][:3] == ["logits", "kv.0.key.out", "kv.0.value.out"]


@pytest.mark.parametrize("family", FAMILIES)
def test_parameters_keep_their_names_and_have_no_data(family):
    ckpt, graph = checkpoint(family), captured(family).model.graph
    empty = {n: tuple(v.shape) for n, v in graph.initializers.items() if v.const_value is None}
    assert empty == {n: ckpt.shape(n) for n in ckpt.param_names() if ckpt.canonical(n) == n}


def test_only_standard_operators():
    assert {n.domain for f in FAMILIES for n in captured(f).model.graph} == {""}


def test_fusions_leave_readable_operators():
    kinds = [n.op_type for n in captured("qwen2_moe").model.graph]
    assert kinds.count("RMSNormalization") == 5
    assert kinds.count("RotaryEmbedding") == 4
    assert "Identity" not in kinds


def test_no_trace_of_the_machine_it_was_made_on():
    import onnx_ir as ir

    from moec.rewrite.pipeline import placeholders

    model = captured("qwen2_moe").model
    with placeholders(model):
        data = ir.to_proto(model).SerializeToString()
    assert b"site-packages" not in data
    assert b".py" not in data


def test_padding_and_idle_rows_change_nothing(exported):
    text = random_texts(3, captured("qwen2_moe").geometry)[0]
    plain, padded = (Stepper(session(exported("qwen2_moe"))) for _ in range(2))
    want = plain.step([(0, text)])
    got = padded.step([(0, text), (1, text[:0])], width=len(text) + 5)
    np.testing.assert_allclose(got[0], want[0], atol=1e-5)
    assert np.isfinite(got).all()
    np.testing.assert_allclose(
        padded.step([(1, text[:0]), (0, text[:1])])[1], plain.step([(0, text[:1])])[0], atol=1e-5
    )


def test_padding_may_reach_beyond_the_context(exported):
    rng = np.random.default_rng(4)
    text = rng.integers(0, 512, CONTEXT).astype(np.int32)
    stepper = Stepper(session(exported("qwen2_moe")))
    stepper.step([(0, text[:-2])])
    got = stepper.step([(0, text[-2:])], width=8)
    np.testing.assert_allclose(
        got, reference_logits(checkpoint("qwen2_moe").load_torch(), text, 1), atol=2e-5
    )
    assert np.isfinite(stepper.step([(1, text[:1]), (0, text[:0])])).all()  # slot 0 is full and idle


def test_windows_come_from_the_cache_not_from_the_arguments(exported):
    geometry = captured("gpt_oss").geometry
    assert [a.window for a in geometry.attention] == [8, 0]
    assert all(a.has_sink_logits for a in geometry.attention)


def test_window_that_the_call_does_not_pass(tmp_path):
    """Qwen2-MoE only masks: its attention never hears of the window."""
    from moec.checkpoint import open_checkpoint
    from tests.helpers.tiny import tiny_checkpoint

    options = dict(use_sliding_window=True, sliding_window=6, max_window_layers=1, layer_types=None)
    path = tiny_checkpoint(tmp_path / "m", tokenizer=False, **options)
    ckpt = open_checkpoint(path)
    made = capture(ckpt, BATCH, CONTEXT)
    assert [a.window for a in made.geometry.attention] == [6, 0]
    save_exported(made, ckpt, tmp_path / "exported.onnx")
    texts = random_texts(5, made.geometry)
    model = ckpt.load_torch()
    for got, text in zip(two_slots(Stepper(session(tmp_path / "exported.onnx")), *texts), texts, strict=True):
        np.testing.assert_allclose(got, reference_logits(model, text), atol=2e-5)


def test_window_as_long_as_the_context_is_none():
    from moec.frontend.probe import probe

    assert [a.window for a in probe(checkpoint("gpt_oss"), 8).attention] == [0, 0]


def test_context_beyond_the_model():
    with pytest.raises(MoecError, match="longer than the model's 1024"):
        capture(checkpoint("qwen2_moe"), 1, 1025)


def test_recurrent_states_are_inputs_and_outputs():
    graph, geometry = captured("lfm2_moe").model.graph, captured("lfm2_moe").geometry
    assert [(s.input, s.shape) for s in geometry.states] == [("state.0.conv0", (128, 3))]
    shapes = {v.name: tuple(v.shape) for v in (*graph.inputs, *graph.outputs) if v.name.startswith("state.")}
    assert shapes == {"state.0.conv0": (BATCH, 128, 3), "state.0.conv0.out": (BATCH, 128, 3)}
    assert [a.layer for a in geometry.attention] == [1]


def test_recurrences_that_nobody_knows_are_refused_with_their_family(monkeypatch):
    from moec.frontend import recurrent
    from moec.frontend.probe import probe

    monkeypatch.setattr(recurrent, "_SCANS", {})
    with pytest.raises(MoecError, match="qwen3_next: layer 0 has a recurrence that is not supported"):
        probe(checkpoint("qwen3_next"), 64)
