"""The sample checkpoint: same bytes every time, loads in transformers, and really routes."""

from __future__ import annotations

import hashlib
import json
import math
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy

from samples.smolmoe.dense import load_model
from samples.smolmoe.make_checkpoint import HERE, make
from samples.smolmoe.routed import RoutedMLP, Routers
from samples.smolmoe.source import gguf_path, load_dense
from samples.smolmoe.split import EXPERT_NEURONS, NUM_EXPERTS, SHARED, SHARED_NEURONS
from tests.helpers.sample import sample_checkpoint, sample_tokenizer
from tests.helpers.text import held_out_texts, play

WINDOW = 384


@pytest.fixture(scope="module")
def dense_model() -> torch.nn.Module:
    return load_model(load_dense()).requires_grad_(False)


@pytest.fixture(scope="module")
def moe_model() -> torch.nn.Module:
    from transformers import AutoModelForCausalLM

    path = sample_checkpoint()
    model, info = AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.float32, experts_implementation="eager", output_loading_info=True
    )
    assert not info["missing_keys"]
    assert not info["unexpected_keys"]
    assert not info["mismatched_keys"]
    return model.eval().requires_grad_(False)


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.tensor(held_out_texts(sample_tokenizer(), WINDOW))


def _hashes(folder: Path) -> dict[str, str]:
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in sorted(folder.iterdir())}


def test_bytes_do_not_change_between_runs(tmp_path: Path) -> None:
    make(tmp_path / "again")
    assert _hashes(tmp_path / "again") == _hashes(sample_checkpoint())
    assert [file.name for file in tmp_path.iterdir()] == ["again"], "the partial folder is left behind"


def test_committed_router_data_is_small_and_whole() -> None:
    assert (HERE / "routers.npz").stat().st_size < 500_000
    groups = Routers.load(HERE / "routers.npz").groups
    for layer in groups:
        expected = [EXPERT_NEURONS] * NUM_EXPERTS + [SHARED_NEURONS]
        assert torch.bincount(layer.long(), minlength=SHARED + 1).tolist() == expected


def test_tokenizer_is_the_one_of_the_gguf() -> None:
    """Against transformers' own reading of the GGUF."""
    from transformers import AutoTokenizer

    theirs = AutoTokenizer.from_pretrained(gguf_path().parent, gguf_file=gguf_path().name)
    ours = AutoTokenizer.from_pretrained(sample_checkpoint())
    text = (
        play("comedies/twelfth-night")[:20_000] + " 2009, x = {'a': [1, 2]}\n\n\tÜber naïve “quotes” 東京 🙂"
    )
    assert ours.encode(text) == theirs.encode(text) == sample_tokenizer().encode(text).ids
    assert ours.decode(ours.encode(text)) == text


def test_chat_template_and_end_tokens() -> None:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(sample_checkpoint())
    messages = [{"role": "user", "content": "Hi"}]
    chat = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
    generation = json.loads((sample_checkpoint() / "generation_config.json").read_text())
    assert tokenizer.convert_ids_to_tokens(generation["eos_token_id"]) == "<|im_end|>"


def test_checkpoint_computes_what_the_scaled_dense_model_computes(moe_model, tokens) -> None:
    """transformers' experts on our tensors against the dense model with scaled neurons, both in bf16."""
    rounded = Routers.load(HERE / "routers.npz")
    rounded.router = rounded.router.bfloat16().float()
    rounded.shared_gate = rounded.shared_gate.bfloat16().float()
    exact = load_model(load_dense()).requires_grad_(False)
    for layer, (*_, scale, down_in, down_out) in zip(exact.model.layers, rounded.layers(), strict=True):
        layer.mlp.down_proj.weight.add_(down_out.T @ down_in).mul_(scale)
    rounded.neuron_scale = torch.ones_like(rounded.neuron_scale)
    rounded.down_out = torch.zeros_like(rounded.down_out)
    exact.load_state_dict({name: value.bfloat16().float() for name, value in exact.state_dict().items()})
    with RoutedMLP.installed(exact, rounded):
        expected = exact(tokens[:1]).logits
    difference = (moe_model(tokens[:1]).logits - expected).abs().amax(-1)
    assert (
        difference.median() < 1e-3
    )  # where the two round a router tie differently, one position differs more


def test_routing_is_uneven_and_uses_every_expert(dense_model, tokens) -> None:
    """Standard deviation of the chosen weights around their mean, relative to it, in every layer."""
    with RoutedMLP.installed(dense_model, Routers.load(HERE / "routers.npz")) as layers:
        dense_model(tokens)
        factors = [layer.factors[..., :NUM_EXPERTS] for layer in layers]
    spread = torch.stack([f[f > 0].std() for f in factors])
    used = torch.stack([(f > 0).float().flatten(0, -2).mean(0) for f in factors])
    assert spread.min() >= 0.05
    assert used.min() >= 0.02
    assert used.max() <= 0.98


def test_every_layer_has_experts(moe_model) -> None:
    assert all(hasattr(layer.mlp, "experts") for layer in moe_model.model.layers)


def test_perplexity_is_at_most_thirty_percent_above_dense(dense_model, moe_model, tokens) -> None:
    dense, moe = _perplexity(dense_model, tokens), _perplexity(moe_model, tokens)
    print(f"held-out perplexity: dense {dense:.2f}, sample {moe:.2f}")
    assert moe <= 1.3 * dense


@pytest.mark.slow
def test_perplexity_of_longer_texts_is_at_most_thirty_percent_above_dense(dense_model, moe_model) -> None:
    windows = torch.tensor(held_out_texts(sample_tokenizer(), 2048)).view(-1, 512)
    dense, moe = _perplexity(dense_model, windows), _perplexity(moe_model, windows)
    print(f"held-out perplexity over 512 tokens each: dense {dense:.2f}, sample {moe:.2f}")
    assert moe <= 1.3 * dense


def _perplexity(model: torch.nn.Module, tokens: torch.Tensor) -> float:
    """Of windows [N,T], one at a time: their logits would take a gigabyte."""
    loss = [cross_entropy(model(window[None]).logits[0, :-1], window[1:]).item() for window in tokens]
    return math.exp(sum(loss) / len(loss))
