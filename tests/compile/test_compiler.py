"""Engines of the synthetic graph: what is in them, that they are reproducible, what is said of failures."""

import dataclasses
import hashlib
import shutil
import struct
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import onnx
import pytest

from moec.compile import compiler
from moec.compile.compiler import compile_engine
from moec.compile.targets import RTX_TARGETS
from moec.errors import MoecError
from tests.helpers.trt_engine import CHUNK, engine, lowered_file, need_tensorrt
from tests.helpers.trt_graph import BATCH

LAYERS = 2


def build(graph: Path, plan: Path, **options):
    options = {"library": need_tensorrt(), "targets": RTX_TARGETS} | options
    targets = options.pop("targets")
    return compile_engine(graph, targets, plan, batch=BATCH, chunk=CHUNK, **options)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_every_moec_node_is_a_plugin_layer_in_both_profiles(dtype):
    report, _ = engine(dtype)
    assert [profile.name for profile in report.profiles] == ["decode", "prefill"]
    for profile in report.profiles:
        layers = {"AsymKVAttention": LAYERS, "PipelinedMoE": LAYERS, "AddRMSNorm": 2 * LAYERS}
        assert profile.plugin_layers == layers | {"QuantizedLinear": 4 * LAYERS + 1}


def test_products_with_bf16_weights_need_no_plugin():
    report, _ = engine(weights="bf16")
    for profile in report.profiles:
        layers = {"AsymKVAttention": LAYERS, "PipelinedMoE": LAYERS, "AddRMSNorm": 2 * LAYERS}
        assert profile.plugin_layers == layers


def test_caches_are_aliased_and_never_copied():
    report, _ = engine()
    caches = [f"kv.{layer}.{part}" for layer in range(LAYERS) for part in ("blocks", "ring")]
    expected = {f"{name}.out": name for name in caches}
    assert report.aliases == expected
    assert report.alias_queries >= len(expected)
    for profile in report.profiles:
        assert profile.copies == ()
        assert not {"Reformat", "Copy"} & set(profile.layer_types)


@pytest.mark.parametrize(
    "options",
    [{"kv_format": "fp16"}, {"window": 128}, {"kv_format": "k4v2", "window": 64}, {"kv_format": "int8"}],
)
def test_other_cache_formats_build(options):
    report, _ = engine(**options)
    assert report.profiles[0].plugin_layers["AsymKVAttention"] == LAYERS


def test_the_report_describes_the_plan():
    report, plan = engine()
    data = plan.read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (report.plan_bytes, report.plan_sha256)
    assert report.targets == RTX_TARGETS
    assert report.tensorrt.startswith("tensorrt_rtx 1.")
    assert 0 < report.seconds < 60
    assert 50 << 20 < report.peak_rss_bytes < 1 << 30
    tree = report.to_json()
    assert "/" not in tree["log"]
    assert "/" not in tree["plan"]


def test_builds_are_identical_whatever_the_paths(tmp_path):
    report, _ = engine()
    far = tmp_path / ("long" * 30) / "folder"
    far.mkdir(parents=True)
    graph = shutil.copy(lowered_file(), far / "other.onnx")
    library = shutil.copy(need_tensorrt(), far / "plugins.so")
    again = build(Path(graph), far / "x.plan", library=Path(library))
    assert again.plan_sha256 == report.plan_sha256


def test_the_plan_carries_the_plugin_library(tmp_path):
    library = Path(shutil.copy(need_tensorrt(), tmp_path / "plugins.so"))
    content = library.read_bytes()
    plan = tmp_path / "engine.plan"
    build(lowered_file(), plan, library=library, targets=["sm_80"])
    library.unlink()
    start = plan.read_bytes().find(b"\x7fELF")
    assert plan.read_bytes()[start : start + len(content)] == content


def test_progress_rises_to_the_end(tmp_path):
    seen = []
    build(lowered_file(), tmp_path / "a.plan", on_progress=lambda *event: seen.append(event))
    fractions = [fraction for fraction, _, _ in seen]
    assert fractions == sorted(fractions)
    assert fractions[0] < 0.2
    assert fractions[-1] > 0.9
    assert all(left >= 0 for _, _, left in seen if left is not None)
    assert any(left is not None for _, _, left in seen)


def test_an_error_in_the_callback_ends_the_child(tmp_path):
    def stop(*_):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        build(lowered_file(), tmp_path / "a.plan", on_progress=stop)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.log"]


def test_ctrl_c_ends_the_child_and_leaves_no_plan(tmp_path):
    code = f"""
import sys
from pathlib import Path
from moec.compile.compiler import compile_engine
graph, plan, library = map(Path, sys.argv[1:])
try:
    compile_engine(graph, {RTX_TARGETS!r}, plan, batch={BATCH}, chunk={CHUNK}, library=library,
                   on_progress=lambda *_: print("alive", flush=True))
except KeyboardInterrupt:
    sys.exit(130)
"""
    command = [sys.executable, "-c", code, lowered_file(), tmp_path / "a.plan", need_tensorrt()]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    process.stdout.readline()
    process.send_signal(2)
    assert process.wait(20) == 130
    time.sleep(0.2)
    assert not list(tmp_path.glob("*.plan"))
    assert not list(tmp_path.glob(".moec-build-*"))


def edited(tmp_path: Path, change) -> Path:
    """The lowered graph after `change(model)`."""
    model = onnx.load(lowered_file())
    change(model)
    path = tmp_path / "edited.onnx"
    onnx.save(model, path)
    return path


def node(model: onnx.ModelProto, name: str) -> onnx.NodeProto:
    return next(n for n in model.graph.node if n.name == name)


def failure(tmp_path: Path, change, **options) -> MoecError:
    with pytest.raises(MoecError) as caught:
        build(edited(tmp_path, change), tmp_path / "a.plan", **options)
    assert not (tmp_path / "a.plan").exists()
    return caught.value


def drop_attribute(name):
    def change(model):
        attributes = node(model, "attention_1").attribute
        attributes.remove(next(a for a in attributes if a.name == name))

    return change


def test_a_missing_attribute_names_node_and_attribute(tmp_path):
    error = failure(tmp_path, drop_attribute("promoted"))
    assert "attention_1" in str(error)
    assert "attribute 'promoted' is missing" in str(error)
    assert str(tmp_path / "a.log") in str(error)


def test_a_wrong_shape_is_explained_by_the_kernels(tmp_path):
    def change(model):
        attribute = next(a for a in node(model, "moe_0").attribute if a.name == "intermediate_size")
        attribute.i = 100

    error = failure(tmp_path, change)
    assert "PipelinedMoE 'moe_0'" in str(error)


def test_a_missing_input_is_named(tmp_path):
    error = failure(tmp_path, lambda model: node(model, "attention_0").input.pop())
    assert "attention_0" in str(error)
    assert "13 inputs" in str(error)


def test_a_function_left_in_the_graph_is_refused(tmp_path):
    def change(model):
        body = [onnx.helper.make_node("Identity", ["hidden"], ["out"])]
        opsets = [onnx.helper.make_opsetid("", 24)]
        function = onnx.helper.make_function("moec", "PipelinedMoE", ["hidden"], ["out"], body, opsets)
        model.functions.append(function)

    error = failure(tmp_path, change)
    assert "function moec::PipelinedMoE is left in the graph" in str(error)


def test_an_op_without_plugin_is_refused(tmp_path):
    def change(model):
        node(model, "moe_1").op_type = "GroupedMoE"

    assert "no TensorRT plugin for moec::GroupedMoE (moe_1)" in str(failure(tmp_path, change))


def test_an_unsupported_type_is_named(tmp_path):
    def change(model):
        value = next(v for v in model.graph.input if v.name == "moe.0.experts")
        value.type.tensor_type.elem_type = onnx.TensorProto.UINT8

    assert "no tensors of type UINT8 (moe.0.experts)" in str(failure(tmp_path, change))


def test_a_standard_op_that_tensorrt_lacks_is_named(tmp_path):
    def change(model):
        model.graph.node.append(onnx.helper.make_node("Det", ["kv.0.k_mean"], ["det"], name="det_0"))
        model.graph.output.append(onnx.helper.make_tensor_value_info("det", onnx.TensorProto.FLOAT, []))

    error = failure(tmp_path, change)
    assert "Det 'det_0'" in str(error)
    assert str(tmp_path / "a.log") in str(error)


def test_a_cache_updated_twice_is_refused(tmp_path):
    def change(model):
        node(model, "attention_1").input[4] = "kv.0.ring"

    assert "kv.0.ring is updated by attention_0 and attention_1" in str(failure(tmp_path, change))


def patched(library: Path, target: Path, symbol: str, value: int) -> Path:
    """A copy of the library with another int32 at an exported symbol."""
    command = ["readelf", "-SW", "--dyn-syms", library]
    text = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    line = next(line for line in text.splitlines() if line.endswith(" " + symbol))
    address, section = int(line.split()[1], 16), int(line.split()[6])
    header = next(line for line in text.splitlines() if line.strip().startswith(f"[{section:2d}]"))
    start, offset = (int(word, 16) for word in header.split("]")[1].split()[2:4])
    data = bytearray(library.read_bytes())
    struct.pack_into("<i", data, address - start + offset, value)
    target.write_bytes(data)
    return target


def test_a_wrong_plugin_abi_version_is_found(tmp_path):
    library = patched(need_tensorrt(), tmp_path / "old.so", "moec_trt_build_version", 1)
    error = failure(tmp_path, lambda model: None, library=library)
    assert "never asked the plugins which outputs share memory" in str(error)
    assert "old.so" in str(error)
    assert "ABI version" in str(error)


def test_a_library_without_creators_is_refused(tmp_path):
    source, library = tmp_path / "empty.cpp", tmp_path / "empty.so"
    source.write_text('extern "C" int nothing() { return 0; }')
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    error = failure(tmp_path, lambda model: None, library=library)
    assert "refuses the plugin library" in str(error)


def test_an_abort_in_the_child_is_one_message(tmp_path):
    source, library = tmp_path / "abort.cpp", tmp_path / "abort.so"
    source.write_text(
        '#include <cstdlib>\n#include <cstdio>\nextern "C" { void *getCreators(int &n) {'
        ' fputs("[moec] planted: about to abort\\n", stderr); abort(); } void setLoggerFinder(void *) {} }'
    )
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    error = failure(tmp_path, lambda model: None, library=library)
    assert "build process died (signal SIGABRT)" in str(error)
    assert "planted: about to abort" in str(error)
    assert str(tmp_path / "a.log") in str(error)


def test_a_plan_that_lacks_layers_is_not_kept(tmp_path):
    report, plan = engine()
    poorer = dataclasses.replace(report.profiles[1], plugin_layers={"AsymKVAttention": 1})
    report = dataclasses.replace(report, profiles=(report.profiles[0], poorer))
    wanted = Counter(report.profiles[0].plugin_layers)
    with pytest.raises(MoecError, match="missing in the prefill profile"):
        compiler._verify(report, wanted, need_tensorrt(), plan)


def test_a_missing_graph_is_an_error(tmp_path):
    with pytest.raises(MoecError, match="cannot be read"):
        build(tmp_path / "none.onnx", tmp_path / "a.plan")
