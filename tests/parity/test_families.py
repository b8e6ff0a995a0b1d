"""Every family on our CPU backend against transformers: fp32 cache, unquantized weights.

Two slots of unequal length, 16 and 9 tokens of prefill together, then 16 steps; each row is compared with its
own unbatched run of transformers (eager attention, its own cache). The numbers go to families.json when
MOEC_FAMILY_REPORT names a file: docs/families.md is made of it.
"""

from __future__ import annotations

import json
import os
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from moec import native
from moec.rewrite.graph_edit import all_logits
from tests.helpers.built import Built, build_graph
from tests.helpers.captured import BATCH, CONTEXT, FAMILIES, captured, checkpoint
from tests.helpers.decided import draw
from tests.helpers.families import ONE_PASS, OVERRIDES
from tests.helpers.graphs import Stepper, session
from tests.helpers.rng import fresh_rng

PREFILL, STEPS = (16, 9), 16
TOLERANCE = 1e-4  # of the range of the logits

ALL = [*FAMILIES, *(pytest.param(f, marks=pytest.mark.slow) for f in OVERRIDES if f not in FAMILIES)]

pytestmark = pytest.mark.skipif(
    native.find_library("moec_cpu") is None, reason="libmoec_cpu.so is not built (cmake --build build/native)"
)


def ours(built: Built, texts: list[np.ndarray]) -> list[np.ndarray]:
    """Logits of every token of both texts, `[S,V]` each: prefill together, then steps in the other order."""
    all_logits(built.model)
    stepper = Stepper(session(built.save("model.onnx"), native.cpu_library()), built.constants)
    first = stepper.step([(1 - i, t[:n]) for i, (t, n) in enumerate(zip(texts, PREFILL, strict=True))])
    parts = [[first[i, :n]] for i, n in enumerate(PREFILL)]
    for step in range(STEPS):
        tokens = [t[n + step : n + step + 1] for t, n in zip(texts, PREFILL, strict=True)]
        out = stepper.step([(0, tokens[1]), (1, tokens[0])])
        parts[1].append(out[0]), parts[0].append(out[1])
    return [np.concatenate(p) for p in parts]


@torch.no_grad()
def theirs(model: torch.nn.Module, text: np.ndarray, one_pass: bool = False) -> np.ndarray:
    """transformers' logits `[S,V]` of one text: prefill, then token by token over its own cache."""
    ids = torch.from_numpy(text.astype(np.int64))[None]
    if one_pass:
        return model(input_ids=ids, use_cache=False).logits[0].float().numpy()
    out = model(input_ids=ids[:, :-STEPS], use_cache=True)
    parts = [out.logits[0]]
    for i in range(ids.shape[1] - STEPS, ids.shape[1]):
        out = model(input_ids=ids[:, i : i + 1], cache=out.cache, use_cache=True)
        parts.append(out.logits[0])
    return torch.cat(parts).float().numpy()


@pytest.mark.parametrize("family", ALL)
def test_parity_with_transformers(family, tmp_path, record_property):
    geometry, model = captured(family).geometry, checkpoint(family).load_torch(experts_implementation="eager")
    built = build_graph(checkpoint(family), tmp_path, captured=captured(family), batch=BATCH, context=CONTEXT)
    run, lengths = partial(theirs, one_pass=family in ONE_PASS), [n + STEPS for n in PREFILL]
    texts = draw(fresh_rng(), model, geometry, built.model.graph, lengths, run=run)
    want = np.concatenate([run(model, text) for text in texts])
    got = np.concatenate(ours(built, texts))
    worst = float(np.abs(got - want).max() / (want.max() - want.min()))
    print(f"{family}: {worst:.1e} of the range")
    _report(family, worst)
    assert want.shape == got.shape == (sum(PREFILL) + 2 * STEPS, geometry.vocab_size)
    assert worst <= TOLERANCE


@pytest.mark.parametrize("family", [f for f in FAMILIES if f == "gpt_oss"])
def test_a_planted_error_is_found(family, tmp_path):
    """The window one token short: the comparison above must not be blind to it."""
    geometry = captured(family).geometry
    built = build_graph(checkpoint(family), tmp_path, captured=captured(family), batch=BATCH, context=CONTEXT)
    node = next(n for n in built.model.graph if n.op_type == "AsymKVAttention")
    window = node.attributes["window"]
    node.attributes["window"] = type(window)("window", window.type, window.value - 1)
    text = fresh_rng().integers(0, geometry.vocab_size, PREFILL[0] + STEPS).astype(np.int32)
    want = theirs(checkpoint(family).load_torch(), text)
    got = ours(built, [text, text[: PREFILL[1] + STEPS]])[0]
    assert np.abs(got - want).max() > 10 * TOLERANCE * (want.max() - want.min())


def _report(family: str, worst: float) -> None:
    path = os.environ.get("MOEC_FAMILY_REPORT")
    if path:
        file = Path(path)
        numbers = json.loads(file.read_text()) if file.is_file() else {}
        file.write_text(json.dumps(numbers | {family: worst}, indent=1) + "\n")
