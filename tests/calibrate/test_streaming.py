"""The streamed model computes what transformers computes, and holds no weights afterwards."""

from __future__ import annotations

import pytest
import torch

from moec.calibrate.streaming import StreamedModel
from moec.checkpoint import open_checkpoint
from tests.helpers.tiny import tiny_checkpoint

FAMILIES = ("qwen2_moe", "mixtral", "gpt_oss", "deepseek_v3", "olmoe", "llama4_text")


def tokens(count: int = 40) -> torch.Tensor:
    return torch.randint(4, 500, (2, count))


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_transformers(tmp_path, family):
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path / "model", family))
    ids = tokens()
    got = StreamedModel(checkpoint).logits(ids, 7)
    with torch.inference_mode():
        want = checkpoint.load_torch()(ids).logits[:, -7:]
    assert got.shape == want.shape
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)


def test_one_layer_is_in_memory_at_a_time(tmp_path):
    checkpoint = open_checkpoint(tiny_checkpoint(tmp_path / "model", num_hidden_layers=3))
    model = StreamedModel(checkpoint)
    held, done = [], []

    def attention(module, query, key, value, mask, **options):
        held.append(sum(_stored(p) for p in model._model.parameters()))
        return query.new_zeros(1, query.shape[2], query.shape[1], value.shape[-1])

    model.attention, model.on_progress = attention, lambda *x: done.append(x)
    model.hidden(tokens())
    layer = sum(p.numel() for n, p in model._model.model.layers[0].named_parameters() if ".experts." not in n)
    assert held == [layer] * 6  # two windows in each of three layers
    assert sum(_stored(p) for p in model._model.parameters()) == 0
    assert done == [(1, 3), (2, 3), (3, 3)]


def _stored(parameter: torch.Tensor) -> int:
    """Elements that have memory of their own."""
    storage = parameter.untyped_storage().nbytes() // parameter.element_size()
    return parameter.numel() if storage >= parameter.numel() > 1 else 0


def test_routing_is_shown(tmp_path):
    model = StreamedModel(open_checkpoint(tiny_checkpoint(tmp_path / "model")))
    seen = {}
    model.on_experts = lambda name, ids: seen.setdefault(name, ids)
    model.hidden(tokens(30))
    assert list(seen) == [f"model.layers.{i}.mlp.experts" for i in range(2)]
    assert {tuple(ids.shape) for ids in seen.values()} == {(60, 2)}
