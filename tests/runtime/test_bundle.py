"""The runtime on real bundles of the tiny model: decode-exact scores, independence of neighbours, damage."""

import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from safetensors import safe_open

import moec
from moec.bundle.reader import open_bundle
from moec.checkpoint import open_checkpoint
from moec.errors import MoecError
from moec.pack.experts_store import open_experts
from moec.runtime.backends.cpu_bundle import open_cpu_backend
from moec.runtime.session import Session
from tests.helpers.bundles import checkpoint, tiny_bundle
from tests.helpers.tiny import VOCAB

CONTEXT = 320
EXACT = {"kv": "fp32", "weights": "bf16", "experts": "bf16"}
# Batch 3 is odd: with all slots busy there is none left for an idle row. Batch 1 never has one.
VARIANTS = {
    "defaults": {"batch": 4},
    "exact": {"batch": 4, **EXACT},
    "odd batch": {"batch": 3},
    "one slot": {"batch": 1},
}
_SESSIONS: dict[str, Session] = {}


def session_of(name):
    if name not in _SESSIONS:
        _SESSIONS[name] = moec.load(tiny_bundle(context=CONTEXT, **VARIANTS[name]), threads=1)
    return _SESSIONS[name]


@pytest.fixture(params=VARIANTS)
def session(request):
    return session_of(request.param)


def tokens_of(rng, count):
    return rng.integers(4, VOCAB, count)


def test_score_is_decode_bit_for_bit(session, rng):
    """Logits of a chunked score and of single steps are the same bits, past the first quantized blocks."""
    tokens, backend = tokens_of(rng, 300), session.backend
    scored = session.score(tokens)
    backend.set_length(0, 0)
    stepped = [backend.step(tokens[None, i : i + 1], [0], [1])[0] for i in range(len(tokens))]
    np.testing.assert_array_equal(scored, stepped)
    np.testing.assert_array_equal(scored, session.score(tokens, chunk=37))


def test_rows_do_not_depend_on_their_neighbours(session, rng):
    """All slots busy with other tokens, in shuffled rows: the same bits as alone."""
    backend, batch = session.backend, session.backend.batch
    tokens = tokens_of(rng, (batch, 200))
    expected = [session.score(row) for row in tokens]
    for slot in range(batch):
        backend.set_length(slot, 0)
    for position in range(200):
        slots = rng.permutation(batch)
        logits = backend.step(tokens[slots, position : position + 1], list(slots), [1] * batch)
        np.testing.assert_array_equal(logits, [expected[slot][position] for slot in slots])


def test_continuous_batching_gives_the_tokens_of_each_alone(session, rng):
    """Nine requests of different lengths over few slots: slots are reused, chunks and steps interleave."""
    requests = [
        (tokens_of(rng, rng.integers(1, 200)).tolist(), {"max_tokens": 20, "temperature": t, "seed": i})
        for i, t in enumerate([0, 1, 1, 0, 0.7, 1, 0, 1, 1.5])
    ]
    together = [session.submit(prompt, **options) for prompt, options in requests]
    session.run()
    for generation, (prompt, options) in zip(together, requests, strict=True):
        alone = session.generate(prompt, **options)
        alone.read()
        assert alone.tokens == generation.tokens


def test_conversation_on_a_kept_prefix_is_exact(session, rng):
    """Going on in the same slot gives the tokens of a fresh run over the whole prompt."""
    first = session.generate(tokens_of(rng, 150).tolist(), max_tokens=10, ignore_eos=True)
    first.read()
    prompt = first._request.prompt + first.tokens + tokens_of(rng, 5).tolist()
    kept = session.generate(prompt, max_tokens=10, temperature=1.0)
    kept.read()
    assert kept.stats.cached_tokens == 159
    for slot in session._scheduler.slots:
        session._scheduler.forget(slot)
    fresh = session.generate(prompt, max_tokens=10, temperature=1.0)
    fresh.read()
    assert fresh.stats.cached_tokens == 0
    assert fresh.tokens == kept.tokens


def test_rolled_back_prefix_is_exact(session, rng):
    """A prompt that leaves the cached one before its end: kept where the ring still has the rows."""
    prompt = tokens_of(rng, 240).tolist()
    session.generate(prompt, max_tokens=1).read()
    for back in (1, 30, 100):
        fork = [*prompt[: 240 - back], 5 + (prompt[240 - back] == 5), 6, 7]
        kept = session.generate(fork, max_tokens=8, temperature=1.0)
        kept.read()
        assert kept.stats.cached_tokens in (0, 240 - back)
        for slot in session._scheduler.slots:
            session._scheduler.forget(slot)
        fresh = session.generate(fork, max_tokens=8, temperature=1.0)
        fresh.read()
        assert fresh.tokens == kept.tokens
        session.generate(prompt, max_tokens=1).read()


def test_the_whole_context_can_be_used(session, rng):
    generation = session.generate(tokens_of(rng, CONTEXT - 3).tolist(), max_tokens=99, ignore_eos=True)
    generation.read()
    assert (generation.stop_reason, len(generation.tokens)) == ("length", 4)


def test_chat_and_text():
    session = session_of("defaults")
    pieces = list(session.generate("Who goes there?", max_tokens=20, seed=3))
    assert "".join(pieces) == session.generate("Who goes there?", max_tokens=20, seed=3).read()
    assert session.generate("x")._request.eos_ids == {2, 3}


def test_state_and_experts_are_not_copied():
    backend = session_of("defaults").backend
    for name, array in backend._arrays.items():
        assert backend._values[name].data_ptr() == array.ctypes.data, name
    experts = backend._arrays["moe.0.experts"]
    while not isinstance(experts, np.memmap):
        experts = experts.base
    rings = [array for name, array in backend._state.items() if name.endswith(".ring")]
    backend.set_length(0, 0)
    before = [ring[0].copy() for ring in rings]
    backend.step(np.array([[7, 8, 9]]), [0], [3])
    assert all((ring[0] != old).any() for ring, old in zip(rings, before, strict=True))


def test_cache_bytes_are_the_layouts():
    session = session_of("defaults")
    layouts = open_bundle(tiny_bundle(context=CONTEXT, **VARIANTS["defaults"])).manifest.kv.values()
    assert session.backend.cache_bytes == sum(layout.bytes_allocated(4) for layout in layouts)


@pytest.fixture
def copy(tmp_path):
    return shutil.copytree(tiny_bundle(context=CONTEXT, **VARIANTS["defaults"]), tmp_path / "bundle")


def flip(path, offset):
    with open(path, "r+b") as file:
        file.seek(offset)
        byte = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([byte ^ 0x10]))


def busiest_expert(layer, tokens):
    """The expert of a layer that transformers sends the most tokens of a text to: others may get none."""
    chosen, model = [], open_checkpoint(checkpoint()).load_torch()
    gate = model.model.layers[layer].mlp.gate
    with torch.no_grad(), gate.register_forward_hook(lambda _, args, out: chosen.append(out[2])):
        model(torch.from_numpy(tokens)[None])
    return int(chosen[0].flatten().bincount().argmax())


def test_damaged_expert_fails_the_requests_that_use_it(copy, rng):
    store, tokens = open_experts(copy / "experts.moex"), tokens_of(rng, 100)
    layer = store.header.layers[1]
    expert = busiest_expert(layer.layer, tokens)
    flip(copy / "experts.moex", layer.offset + expert * layer.blob_bytes + 100)
    session = moec.load(copy, threads=1)
    with pytest.raises(MoecError) as caught:
        session.score(tokens)
    assert caught.value.what == f"experts.moex: layer {layer.layer} expert {expert}: checksum mismatch"
    assert "rebuild" in caught.value.hint
    with pytest.raises(MoecError, match="checksum mismatch"):
        session.generate(tokens.tolist()).read()


def test_damaged_dense_weights_do_not_load(copy):
    flip(copy / "weights.safetensors", 100_000)
    with pytest.raises(MoecError, match=r"weights\.safetensors is damaged"):
        moec.load(copy)


def test_nan_in_the_model_is_a_clean_error(copy, rng):
    """A NaN weight that slipped in: the attention operator refuses it, and the session stays usable."""
    path = copy / "weights.safetensors"
    with safe_open(path, "np") as file:
        name = next(n for n in file.keys() if "input_layernorm" in n)  # noqa: SIM118
        values = file.get_tensor(name)
    data = path.read_bytes()
    at = data.index(values.tobytes())
    path.write_bytes(data[:at] + b"\xff" * values.nbytes + data[at + values.nbytes :])
    session = Session(open_cpu_backend(open_bundle(copy, verify=False), threads=1))
    with pytest.raises(MoecError, match=r"NaN") as caught:
        session.generate(tokens_of(rng, 10).tolist()).read()
    assert "ONNXRuntimeError" not in str(caught.value)
    assert not session.backend.lengths.any()


def test_not_a_bundle(tmp_path):
    with pytest.raises(MoecError, match="not a bundle"):
        moec.load(tmp_path)


@pytest.mark.parametrize("options", [{"device": "tpu"}, {"threads": 0}, {"device": "tensorrt"}])
def test_bad_options(options):
    with pytest.raises(MoecError):
        moec.load(tiny_bundle(context=CONTEXT, **VARIANTS["defaults"]), **options)


def test_threads_do_not_change_the_result(rng):
    tokens = tokens_of(rng, 100)
    two = moec.load(tiny_bundle(context=CONTEXT, **VARIANTS["defaults"]), threads=2)
    np.testing.assert_array_equal(two.score(tokens), session_of("defaults").score(tokens))


def test_sessions_of_one_process_may_run_at_once(rng):
    """They share their helping threads, which serve one at a time; the others' operators go on without."""
    texts = [tokens_of(rng, 60) for _ in range(3)]
    alone = [session_of("defaults").score(text) for text in texts]
    sessions = [moec.load(tiny_bundle(context=CONTEXT, **VARIANTS["defaults"]), threads=3) for _ in texts]
    with ThreadPoolExecutor(len(texts)) as pool:
        together = list(pool.map(lambda session, text: session.score(text), sessions, texts))
    for expected, got in zip(alone, together, strict=True):
        np.testing.assert_array_equal(got, expected)


def test_loading_and_generating_imports_no_torch():
    bundle = tiny_bundle(context=CONTEXT, **VARIANTS["defaults"])
    code = (
        "import sys, moec; moec.load(sys.argv[1], threads=1).generate('x', max_tokens=2).read();"
        "sys.exit([m for m in ('torch', 'transformers') if m in sys.modules] or 0)"
    )
    subprocess.run([sys.executable, "-c", code, str(bundle)], check=True, timeout=60)
