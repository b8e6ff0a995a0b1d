"""How GPU tests turn a bundle's binding table into memory and steps (tests/helpers/gpu_*): needs no GPU."""

from dataclasses import asdict

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors import safe_open

from moec.bundle.reader import open_bundle
from moec.compile.memory_plan import EngineBinding, from_json, to_json
from moec.compile.targets import RTX_CAN
from moec.pack.experts_store import open_experts
from moec.runtime.backends.cpu_bundle import open_cpu_backend
from tests.helpers.bundles import tiny_bundle
from tests.helpers.gpu import engine_module
from tests.helpers.gpu_buffers import buffer_bytes, contents, exchanged, owners
from tests.helpers.gpu_engine import padded_request
from tests.helpers.gpu_reference import exact_backend, play, relative_errors, script
from tests.helpers.rng import fresh_rng
from tests.helpers.trt_engine import need_tensorrt


@pytest.fixture(scope="module")
def bundle():
    need_tensorrt()
    return open_bundle(tiny_bundle(target="sm_80", context=256, batch=2))


def table_of(bundle):
    return from_json(bundle.manifest.engines[0]["bindings"])


def test_buffers_add_up_to_the_memory_plan(bundle):
    table, plan = table_of(bundle), bundle.manifest.engines[0]["memory"]
    sizes = buffer_bytes(table)
    for source, part in (("store", "experts"), ("cache", "cache"), ("calibration", "calibration")):
        assert sum(sizes[b.name] for b in table if b.source == source and b.name in sizes) == plan[part]
    assert sum(sizes.values()) <= plan["total"] - plan["activations"]
    assert {owner for owner in owners(table).values()} == set(sizes)
    assert owners(table)["kv.0.ring.out"] == "kv.0.ring"
    assert exchanged(table) == []


def test_contents_are_the_files(bundle):
    """Each array against safetensors' and the expert store's own readers."""
    table = {b.name: b for b in table_of(bundle)}
    found = dict(contents(bundle.path, table.values()))
    assert found.keys() == {b.name for b in table.values() if b.place is not None}
    store = open_experts(bundle.file("experts.moex"))
    for name in [name for name in found if name.startswith("moe.")]:
        np.testing.assert_array_equal(found.pop(name)[:, 0], store.layer(int(name.split(".")[1])))
    tensors = {}
    for file in ("weights.safetensors", "calibration.safetensors"):
        with safe_open(bundle.file(file), "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    assert any(table[name].transform == "cast" for name in found)
    for name, array in found.items():
        want = as_numpy(tensors[name])
        want = want.view(np.int8) if name.endswith(".codes") else want.astype(array.dtype)
        np.testing.assert_array_equal(array, want.reshape(array.shape), err_msg=name)


def as_numpy(tensor):
    if tensor.dtype == torch.bfloat16:
        return tensor.view(torch.uint16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


def binding(name, nbytes=8, source="cache", **options):
    return EngineBinding(name, "int8", ((nbytes,), (nbytes,)), nbytes, source, **options)


def test_recurrent_states_have_two_buffers():
    table = [
        binding("state.0.conv"), binding("kv.1.ring"), binding("state.0.conv.out"),
        binding("kv.1.ring.out", alias_of="kv.1.ring"), binding("logits", source="result"),
    ]  # fmt: skip
    table = from_json([asdict(b) for b in table])
    assert to_json(table)[3]["alias_of"] == "kv.1.ring"
    assert exchanged(table) == [("state.0.conv", "state.0.conv.out")]
    assert set(buffer_bytes(table)) == {"state.0.conv", "kv.1.ring", "state.0.conv.out", "logits"}


@pytest.mark.parametrize("alias", ["kv.0.ring", "kv.9.ring"])
def test_an_alias_must_fit(alias):
    table = [binding("kv.0.ring", 16), binding("kv.0.ring.out", 8, alias_of=alias)]
    with pytest.raises(ValueError, match=r"kv\.0\.ring\.out cannot share"):
        buffer_bytes(table)


def test_missing_rows_are_idle_in_free_slots():
    request = padded_request((4, 3), np.array([[5, 6], [7, 8]]), (3, 1), (2, 1), 4)
    np.testing.assert_array_equal(request["input_ids"], [[5, 6, 0], [7, 8, 0], [0] * 3, [0] * 3])
    assert request["slot_ids"].tolist() == [3, 1, 0, 2]
    assert request["num_tokens"].tolist() == [2, 1, 0, 0]
    with pytest.raises(ValueError, match="does not fit a profile of 1 x 3"):
        padded_request((1, 3), np.zeros((2, 1)), (0, 1), (1, 1), 4)


def test_the_cpu_says_what_fp16_costs(tmp_path):
    """Steps that fill a block, on the exact and the rounded graph: close, and not the same."""
    rng, folder = fresh_rng(), tiny_bundle(context=256, batch=2)
    backends = [open_cpu_backend(open_bundle(folder), threads=1)]
    for name in ("exact", "half"):
        (tmp_path / name).mkdir()
        backends.append(exact_backend(folder, tmp_path / name, half=name == "half"))
    steps = script(rng, backends[0].vocab_size, [150, 9], 6, 128)
    shipped, exact, half = (play(steps, backend) for backend in backends)
    assert len(exact) == 3 + 6 * 2 - 2  # two of the decode steps have an idle row
    assert backends[1].lengths.sum() == 159 + 10
    assert 0 < np.median(relative_errors(half, exact)) < 0.1
    assert 0 < np.median(relative_errors(shipped, exact)) < 0.25


def test_one_module_builds_for_each_architecture():
    assert all(engine_module(arch) in ("tensorrt_rtx", None) for arch in RTX_CAN)
