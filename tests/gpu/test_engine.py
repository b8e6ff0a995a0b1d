"""A tiny bundle's engine on the local GPU: bound by the manifest's table, compared with the CPU backend.

Tolerance: an engine keeps activations in fp16, and a router close to a tie then chooses another expert. The
CPU graph with every result rounded to fp16 says how much that is for the very steps of a test.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from moec.bundle.reader import open_bundle
from moec.runtime.backends.cpu_bundle import open_cpu_backend
from tests.helpers.gpu import engine_module, why_no_engine
from tests.helpers.gpu_reference import exact_backend, play, relative_errors, script

CONTEXT, BATCH = 256, 2
PROMPTS, DECODES = [200, 33], 24  # 144 tokens fill the first block of a cache; 200 take two prefill steps
EXACT = {"kv": "fp16", "weights": "bf16", "experts": "bf16"}
VARIANTS = {
    "qwen2_moe": ("qwen2_moe", {}),
    "qwen2_moe-exact": ("qwen2_moe", EXACT),
    "gpt_oss": ("gpt_oss", {}),  # windows, sink logits, biases, clipped gates
    "mixtral-k4v2": ("mixtral", {"kv": "k4v2"}),
    "mixtral-int8": ("mixtral", {"kv": "int8"}),
}


class Case:
    """A bundle with an engine for the local GPU, and that engine opened."""

    def __init__(self, gpu, family: str, options: dict) -> None:
        from tests.helpers.bundles import tiny_bundle
        from tests.helpers.gpu_engine import GpuEngine

        self.folder: Path = tiny_bundle(family, target=gpu.arch, context=CONTEXT, batch=BATCH, **options)
        self.bundle = open_bundle(self.folder)
        self.entry = next(e for e in self.bundle.manifest.engines if e["module"] == engine_module(gpu.arch))
        assert gpu.arch in self.entry["targets"]
        self.engine = GpuEngine(self.folder, self.entry)
        self.vocab = self.engine.table["logits"].shapes[0][1]

    def steps(self, rng: np.random.Generator):
        self.engine.reset()
        return script(rng, self.vocab, PROMPTS, DECODES, self.engine.chunk)


@pytest.fixture(scope="module", params=VARIANTS)
def case(request, gpu):
    reason = why_no_engine(gpu)
    if reason:
        pytest.skip(reason)
    case = Case(gpu, *VARIANTS[request.param])
    yield case
    case.engine.close()


def test_engine_records_the_binding_table(case):
    engine, table = case.engine.engine, case.engine.table
    names = {engine.get_tensor_name(i) for i in range(engine.num_io_tensors)}
    assert names == set(table)
    assert engine.num_optimization_profiles == len(case.entry["profiles"]) == 2
    for name, binding in table.items():
        is_input = engine.get_tensor_mode(name).name == "INPUT"
        assert is_input == (binding.source != "result" and not name.endswith(".out")), name
        if is_input:
            assert profile_shapes(engine, binding) == binding.shapes, name
        else:
            assert (engine.get_aliased_input_tensor(name) or None) == binding.alias_of, name


def profile_shapes(engine, binding):
    """The static shape of an input in each profile; only inputs with symbolic dimensions are in profiles."""
    name, declared = binding.name, tuple(engine.get_tensor_shape(binding.name))
    if -1 not in declared:
        return (declared,) * len(binding.shapes)
    bounds = [engine.get_tensor_profile_shape(name, index) for index in range(len(binding.shapes))]
    assert all(tuple(low) == tuple(best) == tuple(high) for low, best, high in bounds), name
    return tuple(tuple(best) for _, best, _ in bounds)


def test_logits_as_on_the_cpu(case, rng, tmp_path):
    """Every row of prefill and decode steps; the same steps in exact and in rounded arithmetic on the CPU."""
    steps = case.steps(rng)
    got = play(steps, case.engine)
    folders = [tmp_path / name for name in ("exact", "half")]
    for folder in folders:
        folder.mkdir()
    want = play(steps, exact_backend(case.folder, folders[0]))
    half = play(steps, exact_backend(case.folder, folders[1], half=True))
    assert np.isfinite(got).all()
    errors, rounding = relative_errors(got, want), relative_errors(half, want)
    for quantile in (0.5, 0.75):
        allowed = 3 * np.quantile(rounding, quantile) + 0.02
        assert np.quantile(errors, quantile) <= allowed, (quantile, errors, rounding)


def test_logits_near_the_backend_that_users_run(case, rng):
    """The same with the bundle's own graph, whose int4 products round activations to int8."""
    steps = case.steps(rng)
    errors = relative_errors(play(steps, case.engine), play(steps, open_cpu_backend(case.bundle, threads=1)))
    assert np.median(errors) < 0.2, errors


def test_second_run_is_bit_identical(case, rng):
    steps = case.steps(rng)
    first = play(steps, case.engine)
    case.engine.reset()
    np.testing.assert_array_equal(play(steps, case.engine).view(np.uint32), first.view(np.uint32))


def test_neighbouring_rows_do_not_matter(case, rng):
    """A slot decoded beside another one has the bits of the same slot decoded beside an idle row."""
    steps = case.steps(rng)
    prefills = [step for step in steps if len(step.slot_ids) == 1]
    tokens = rng.integers(case.vocab, size=(BATCH, 1)).astype(np.int32)
    rows = []
    for counts in ((1, 1), (1, 0)):
        case.engine.reset()
        play(prefills, case.engine)
        rows.append(case.engine.step(tokens, (0, 1), counts)[0])
    np.testing.assert_array_equal(rows[0].view(np.uint32), rows[1].view(np.uint32))


def test_caches_are_updated_in_place(case, rng):
    """What a step appends is in the input's own memory, and only there: other slots stay empty."""
    case.engine.reset()
    ids = rng.integers(case.vocab, size=(1, case.engine.chunk)).astype(np.int32)
    for _ in range(2):
        case.engine.step(ids[:, :100], (1,), (100,))
    caches = [name for name, b in case.engine.table.items() if b.alias_of and ".ring" in name]
    assert caches
    for name in caches:
        ring = case.engine.read(name.removesuffix(".out"))
        assert np.isfinite(ring.astype(np.float32)).all(), name
        assert ring[1].any(), name
        assert not ring[0].any(), name


def test_graphs_equal_plain_steps(case, rng):
    """One captured CUDA graph a profile, replayed for every step: the bits of plain launches."""
    steps = case.steps(rng)
    plain = play(steps, case.engine)
    case.engine.reset()
    replayed = play(steps, case.engine, graph=True)
    np.testing.assert_array_equal(replayed.view(np.uint32), plain.view(np.uint32))
