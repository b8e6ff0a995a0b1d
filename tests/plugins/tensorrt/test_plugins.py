"""The plugin library, driven through the plugin ABI without TensorRT."""

import re
import struct
import subprocess

import numpy as np
import pytest

from tests.helpers.rng import fresh_rng
from tests.helpers.trt_graph import attention_attributes, expert_attributes, layout, router_attributes

OPS = {
    "AsymKVAttention": (13, attention_attributes(layout(), 3)),
    "PipelinedMoE": (9, {**expert_attributes(3), **router_attributes()}),
    "Experts": (7, expert_attributes(3)),
    "QuantizedLinear": (3, {"bits": 8, "group_size": 64, "version": 1}),
    "AddRMSNorm": (3, {"epsilon": 1e-6, "scale_offset": 0.0, "version": 1}),
}
F, H, I8, I32, B = "0", "1", "2", "3", "7"


def run(probe, library, op, attributes, code=0):
    inputs, _ = OPS[op]
    arguments = [f"{name}={value}" for name, value in attributes.items()]
    result = subprocess.run([probe, library, op, str(inputs), *arguments], capture_output=True, text=True)
    assert result.returncode == code, result.stdout + result.stderr
    return result.stdout.splitlines(), result.stderr


def fields(lines, title):
    start = lines.index(title) + 1
    found = {}
    for line in lines[start:]:
        match = re.fullmatch(r"(\w+) ([sfi]) (\d+) (.*)", line)
        if match is None:
            break
        found[match[1]] = (match[2], int(match[3]), match[4])
    return found


def random_attributes(op):
    """Attributes with random numbers where any number is valid."""
    rng = fresh_rng()
    attributes = dict(OPS[op][1])
    for name, value in attributes.items():
        if isinstance(value, float):
            attributes[name] = float(np.float32(rng.standard_normal()))
        elif isinstance(value, int) and name != "version":
            attributes[name] = int(rng.integers(0, 1 << 20))
    return attributes


@pytest.mark.parametrize("op", OPS)
def test_every_attribute_survives_serialization(probe, library, op):
    attributes = random_attributes(op)
    lines, _ = run(
        probe, library, op, {k: repr(v) if isinstance(v, float) else v for k, v in attributes.items()}
    )
    first, second = fields(lines, "first"), fields(lines, "second")
    assert first == second
    assert set(first) == set(attributes)
    for name, value in attributes.items():
        kind, length, text = first[name]
        if isinstance(value, str):
            assert (kind, length, text) == ("s", len(value) + 1, value)
        elif isinstance(value, float):
            assert kind == "f"
            assert struct.pack("f", float.fromhex(text)) == struct.pack("f", value)
        else:
            assert (kind, int(text)) == ("i", value)


@pytest.mark.parametrize("op", OPS)
def test_a_missing_attribute_is_named(probe, library, op):
    for name in OPS[op][1]:
        attributes = {key: value for key, value in OPS[op][1].items() if key != name}
        _, message = run(probe, library, op, attributes, code=3)
        assert f"[moec] {op} 'node_name': attribute '{name}' is missing" in message


@pytest.mark.parametrize(
    ("op", "name", "value"),
    [
        ("AsymKVAttention", "version", 2),
        ("AsymKVAttention", "layout", "mma"),
        ("AsymKVAttention", "format", "fp32"),
        ("PipelinedMoE", "scoring", "argmax"),
        ("PipelinedMoE", "activation", "tanh"),
        ("PipelinedMoE", "group_score", "mean"),
        ("Experts", "weight_format", "int3"),
        ("Experts", "tile_layout", "mma"),
        ("QuantizedLinear", "version", 0),
        ("AddRMSNorm", "version", 2),
    ],
)
def test_a_value_without_a_kernel_is_refused(probe, library, op, name, value):
    _, message = run(probe, library, op, {**OPS[op][1], name: value}, code=3)
    assert f"[moec] {op} 'node_name': attribute '{name}'" in message


def test_caches_alias_their_inputs(probe, library):
    lines, _ = run(probe, library, "AsymKVAttention", OPS["AsymKVAttention"][1])
    assert "outputs 3 aliases -1 3 4" in lines
    assert "interface PLUGIN_V3ONE_BUILD 2" in lines


def test_a_norm_gives_its_sum_too_in_memory_of_its_own(probe, library):
    lines, _ = run(probe, library, "AddRMSNorm", OPS["AddRMSNorm"][1])
    assert "outputs 2 aliases -1 -1" in lines


@pytest.mark.parametrize(("op", "spilled"), [("PipelinedMoE", "-1 7 8"), ("Experts", "-1 5 6")])
def test_expert_state_exists_only_with_slots(probe, library, op, spilled):
    lines, _ = run(probe, library, op, OPS[op][1])
    assert "outputs 1 aliases -1" in lines
    lines, _ = run(probe, library, op, {**OPS[op][1], "num_slots": 4})
    assert f"outputs 3 aliases {spilled}" in lines


@pytest.mark.parametrize(
    ("op", "kinds"),
    [
        ("AsymKVAttention", ["A", "A", "A", I8, H, I32, I32, I32, F, F, I32, F, F, "A", I8, H]),
        ("PipelinedMoE", ["A", I32, F, F, F, F, I8, I32, I8, "A"]),
        ("Experts", ["A", I32, I32, F, I8, I32, I8, "A"]),
        ("QuantizedLinear", ["A", I8, H, "A"]),
        ("AddRMSNorm", ["A", "A", "A", "A", "A"]),
    ],
)
def test_only_linear_tensors_of_the_right_types_are_taken(probe, library, op, kinds):
    lines, _ = run(probe, library, op, OPS[op][1])
    for activation in (H, B):
        expected = [activation if kind == "A" else kind for kind in kinds]
        # The first tensor decides the activation type, so it may be either.
        expected[0] = H + B
        assert f"formats {activation}: {' '.join(expected)}" in lines


def test_the_library_needs_only_glibc(library):
    text = subprocess.run(["ldd", library], capture_output=True, text=True, check=True).stdout
    needed = {line.split()[0].split(".")[0] for line in text.splitlines()}
    assert needed <= {"linux-vdso", "libc", "libm", "libpthread", "libdl", "librt", "/lib64/ld-linux-x86-64"}


def test_the_library_exports_nothing_else(library):
    text = subprocess.run(
        ["nm", "-D", "--defined-only", library], capture_output=True, text=True, check=True
    ).stdout
    names = {line.split()[-1] for line in text.splitlines()}
    assert names == {"getCreators", "setLoggerFinder", "moec_trt_alias_queries", "moec_trt_build_version"}
