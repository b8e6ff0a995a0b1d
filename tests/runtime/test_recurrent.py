"""Bundles of models with recurrent layers: states follow their slots, start at zero, never go back."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

import moec
from moec import native
from moec.checkpoint import open_checkpoint
from tests.helpers.decided import decided_texts
from tests.helpers.families import RECURRENT
from tests.helpers.graphs import reference_logits
from tests.helpers.rng import fresh_rng
from tests.helpers.tiny import tiny_checkpoint

pytestmark = pytest.mark.skipif(
    native.find_library("moec_cpu") is None, reason="libmoec_cpu.so is not built (cmake --build build/native)"
)
FAMILIES = ["qwen3_next", *(pytest.param(f, marks=pytest.mark.slow) for f in RECURRENT if f != "qwen3_next")]
CONTEXT = 96


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    """family -> (session of 3 slots, transformers model), exact formats, made once."""

    @cache
    def get(family: str):
        folder: Path = tmp_path_factory.mktemp(family)
        path = tiny_checkpoint(folder / "model", family, **RECURRENT[family])
        exact = dict(kv="fp32", weights="bf16", experts="bf16", target="cpu")
        moec.build(path, folder / "bundle", context=CONTEXT, batch=3, **exact)
        return moec.load(folder / "bundle", "cpu", threads=1), open_checkpoint(path).load_torch()

    return get


@pytest.mark.parametrize("family", FAMILIES)
def test_score_equals_transformers_in_any_chunks(bundle, family):
    session, model = bundle(family)
    (tokens,) = decided_texts(family, (CONTEXT - 3,))
    want = reference_logits(model, tokens, last=len(tokens))
    whole = session.score(tokens)
    assert np.abs(whole - want).max() <= 1e-4 * (want.max() - want.min())
    for chunk in (1, 7, 32):
        assert np.abs(session.score(tokens, chunk=chunk) - whole).max() <= 1e-5 * (want.max() - want.min())


def test_neighbours_and_idle_rows_change_nothing(bundle):
    session, _ = bundle("qwen3_next")
    rng = fresh_rng()
    prompts = [[int(t) for t in rng.integers(0, 512, n)] for n in (5, 17, 2, 9)]
    together = [session.submit(p, max_tokens=8, ignore_eos=True) for p in prompts]
    session.run()
    for prompt, generation in zip(prompts, together, strict=True):
        alone = session.submit(prompt, max_tokens=8, ignore_eos=True)
        session.run()
        assert alone.tokens == generation.tokens


def test_a_prompt_that_leaves_the_cached_one_starts_again(bundle):
    """The slots hold prompts; a prompt that shares only their beginning must not find the later state."""
    session, model = bundle("qwen3_next")
    tokens = [int(t) for t in fresh_rng().integers(0, 512, 20)]
    for prompt in (tokens, [*tokens[:12], 7, 8], [*tokens[:12], 7, 8]):
        generation = session.submit(prompt, max_tokens=3, temperature=0.0, ignore_eos=True)
        session.run()
        ids = torch.tensor([prompt])
        for token in generation.tokens:
            with torch.no_grad():
                logits = model(input_ids=ids, use_cache=False).logits[0, -1]
            assert logits[token] >= logits.max() - 1e-4 * (logits.max() - logits.min())
            ids = torch.cat([ids, torch.tensor([[token]])], 1)


def test_manifest_binds_states_to_themselves(bundle):
    session, _ = bundle("qwen3_next")
    assert session.backend.recurrent
    names = [n for n in session.backend._state if n.startswith("state.")]
    assert names == ["state.0.conv0", "state.0.recurrent"]
