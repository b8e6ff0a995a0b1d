"""Every instruction set that this CPU has gives the same state and nearly the same results."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from moec.native import cpu_isa, cpu_library, xxh64
from moec.reference.kv_cache import KVLayout
from tests.helpers.cpu_attention import AttentionCase
from tests.helpers.cpu_moe import MoeCase
from tests.helpers.cpu_op import CpuOp, run_with_isa

CODE = """
import json, numpy as np
from moec.native import cpu_isa
from moec.reference.kv_cache import KVLayout
from tests.helpers.cpu_attention import AttentionCase
from tests.helpers.cpu_op import CpuOp
from tests.helpers.cpu_moe import MoeCase
rng, outs, states = np.random.default_rng(SEED), [], []
for format, hq, hkv, dk, dv in (("mkv2", 9, 3, 64, 64), ("mkv2_lean", 5, 1, 80, 48), ("int8", 7, 1, 84, 72),
                                ("fp16", 4, 2, 36, 20)):
    case = AttentionCase(KVLayout(format, hkv, dk, dv, 300), hq, rng, sink_logits=True)
    state = case.state()
    out = CpuOp("AsymKVAttention", **case.attributes)(
        in_place=True, **case.inputs(case.tokens(1, 220), state, [0], [220]))[0]
    outs.append(out.ravel())
    states += [state.blocks.ravel().tolist(), state.ring.view(np.uint16)[:, :, :200].ravel().tolist()]
def experts(**extra):
    case = MoeCase(rng, 100, 72, **extra)
    op = CpuOp("PipelinedMoE", **case.attributes)
    return op(**case.pipelined(case.tokens(9), [9]))[0].ravel()
outs += [experts(), experts(weight_format="bf16")]
rounded = experts(weight_format="int4", extra=dict(compute="int8")).tolist()
print(json.dumps(dict(isa=cpu_isa(), outs=np.concatenate(outs).tolist(), rounded=rounded, states=states)))
"""


def supported() -> list[str]:
    flags = Path("/proc/cpuinfo").read_text().split()
    names = ["portable"]
    if {"avx2", "fma", "f16c"} <= set(flags):
        names.append("avx2")
    if {"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_vnni"} <= set(flags):
        names.append("avx512")
    return names


def test_instruction_sets_agree(rng):
    code = CODE.replace("SEED", str(rng.integers(2**31)))
    results = [run_with_isa(isa, code) for isa in supported()]
    assert [r["isa"] for r in results] == supported()
    for other in results[1:]:
        assert other["states"] == results[0]["states"]
        np.testing.assert_allclose(other["outs"], results[0]["outs"], rtol=0, atol=3e-5)
        # Without FMA a last bit differs, and once in thirty runs it moves a 15-bit activation by a step.
        np.testing.assert_allclose(other["rounded"], results[0]["rounded"], rtol=0, atol=3e-4)


DECODE = """
import json, numpy as np
from moec.native import cpu_isa
from moec.reference.kv_cache import KVLayout
from tests.helpers.cpu_attention import AttentionCase
from tests.helpers.cpu_op import CpuOp
rng, different = np.random.default_rng(SEED), []
for format, hq, hkv, dk, dv in (("mkv2", 9, 3, 64, 64), ("int8", 9, 3, 64, 64), ("int8", 1, 1, 128, 128),
                                ("int8", 6, 3, 84, 20), ("int8", 8, 2, 40, 272)):
    case = AttentionCase(KVLayout(format, hkv, dk, dv, 300), hq, rng)
    op, tokens = CpuOp("AsymKVAttention", **case.attributes), case.tokens(1, 240)
    chunk, single = case.state(), case.state()
    whole = op(in_place=True, **case.inputs(tokens, chunk, [0], [240]))[0].copy()
    for i in range(240):
        case.lengths[0] = i
        part = {name: array[:, i : i + 1] for name, array in tokens.items()}
        out = op(in_place=True, **case.inputs(part, single, [0], [1]))[0]
        different += [] if np.array_equal(out[0, 0], whole[0, i]) else [(format, dk, i)]
print(json.dumps(dict(isa=cpu_isa(), different=different)))
"""


@pytest.mark.parametrize("isa", supported())
def test_decode_has_the_bits_of_prefill(rng, isa):
    """One token's kernels read codes, a chunk's read unpacked panels."""
    result = run_with_isa(isa, DECODE.replace("SEED", str(rng.integers(2**31))))
    assert result == {"isa": isa, "different": []}


def test_threads_do_not_change_a_bit(rng):
    case = AttentionCase(KVLayout("mkv2", 3, 64, 64, 300), 9, rng, batch=2)
    tokens, state = case.tokens(2, 200), case.state()
    moe = MoeCase(rng, 320, 160, extra=dict(compute="int8"))
    hidden, results = moe.tokens(40), []
    for threads in (1, 2, 3):
        attention = CpuOp("AsymKVAttention", threads, **case.attributes)
        results.append(attention(**case.inputs(tokens, state, [1, 0], [200, 150])))
        results[-1] += CpuOp("PipelinedMoE", threads, **moe.attributes)(**moe.pipelined(hidden, [40]))[:1]
    for other in results[1:]:
        for a, b in zip(results[0], other, strict=True):
            np.testing.assert_array_equal(a.view(np.uint8), b.view(np.uint8))


def test_the_best_one_is_the_default():
    assert cpu_isa() in supported()


def test_unknown_instruction_set_is_an_error():
    code = "import json\nfrom tests.plugins.cpu.test_dispatch import one_step\nprint(json.dumps(one_step()))"
    assert "MOEC_CPU_ISA=mmx" in run_with_isa("mmx", code)["error"]


def test_asking_for_an_unknown_instruction_set_is_an_error():
    code = (
        "import json\nfrom moec.native import cpu_isa\ntry:\n    cpu_isa()\n"
        "except Exception as error:\n    print(json.dumps(dict(error=str(error))))"
    )
    assert "MOEC_CPU_ISA=mmx" in run_with_isa("mmx", code)["error"]


def one_step() -> dict:
    """The error of a session in this process, for the test above."""
    case = MoeCase(np.random.default_rng(0))
    try:
        CpuOp("PipelinedMoE", **case.attributes)(**case.pipelined(case.tokens(1), [1]))
    except Exception as error:
        return {"error": str(error)}
    return {"error": ""}


def test_no_instruction_set_leaks_out_of_its_file():
    """Functions outside of the kernels_*.cpp files use no AVX registers: they run on any CPU."""
    listing = subprocess.run(
        ["objdump", "-d", "--no-show-raw-insn", "-C", str(cpu_library())], capture_output=True, text=True
    )
    if listing.returncode:
        pytest.skip("objdump is not here")
    function, leaks = "", set()
    for line in listing.stdout.splitlines():
        if line.endswith(">:"):
            function = line.split("<", 1)[1][:-2]
        elif ("%ymm" in line or "%zmm" in line) and "(anonymous namespace)" not in function:
            leaks.add(function)
    assert not leaks - {"moec::avx2_kernels()", "moec::avx512_kernels()"}


@pytest.mark.parametrize("size", [0, 1, 3, 4, 7, 8, 31, 32, 33, 100, 4096])
def test_xxh64(rng, size):
    xxhash = pytest.importorskip("xxhash")
    data = rng.integers(0, 256, size, np.uint8)
    assert xxh64(data) == xxhash.xxh64_intdigest(data.tobytes())


def test_library_needs_nothing_unusual():
    """Only libc and libm at run time: the wheel works on any distribution."""
    listing = subprocess.run(["ldd", str(cpu_library())], capture_output=True, text=True, check=True).stdout
    names = {line.split()[0].split("/")[-1] for line in listing.splitlines() if line.strip()}
    allowed = ("linux-vdso", "libc.", "libm.", "ld-linux", "libpthread", "libgcc_s")
    assert all(name.startswith(allowed) for name in names), json.dumps([sys.platform, sorted(names)])
