"""Microseconds of a CPU operator: one node, state in place, one thread, shapes of the sample model.

    python -m benchmarks.cpu_ops [--repeats 200] [--format mkv2]

The state is random bytes (time does not depend on them); CPU time of the calling thread, best of five rounds.
"""

from __future__ import annotations

import argparse
import time

import numpy as np
import onnxruntime as ort

from benchmarks.report import save, show
from moec.native import cpu_isa
from moec.reference.kv_cache import KVLayout
from tests.helpers.cpu_attention import AttentionCase
from tests.helpers.cpu_moe import MoeCase
from tests.helpers.cpu_op import CpuOp

CONTEXTS = (16, 256, 1024, 4096)
ROUNDS = 5


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=200)
    parser.add_argument("--format", default="mkv2")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    decode = [_decode(rng, options.format, context, options.repeats) for context in CONTEXTS]
    show(f"AsymKVAttention, decode, 9 query and 3 KV heads of 64 ({cpu_isa()})", decode)
    prefill = [_prefill(rng, options.format, context) for context in (0, 896, 3968)]
    show("AsymKVAttention, prefill of 128 tokens", prefill)
    moe = [_moe(rng, tokens, options.repeats) for tokens in (1, 2, 4, 128)]
    show("PipelinedMoE, hidden 576, 8 experts of 64, top 4, int4 x int8", moe)
    save("cpu_ops", {"isa": cpu_isa(), "decode": decode, "prefill": prefill, "moe": moe})


def _attention(rng: np.random.Generator, format: str, context: int) -> tuple[AttentionCase, CpuOp]:
    case = AttentionCase(KVLayout(format, 3, 64, 64, max(context + 256, 512)), 9, rng)
    case.lengths[0] = context
    return case, CpuOp("AsymKVAttention", **case.attributes)


def _decode(rng: np.random.Generator, format: str, context: int, repeats: int) -> dict[str, object]:
    case, op = _attention(rng, format, context)
    state = case.state()
    state.ring[:] = 0
    us = _time(op, case.inputs(case.tokens(1, 1), state, [0], [1]), repeats)
    return {"context": context, "us": us, "ns per cached token": 1e3 * us / context}


def _prefill(rng: np.random.Generator, format: str, context: int) -> dict[str, object]:
    case, op = _attention(rng, format, context)
    state = case.state()
    state.ring[:] = 0
    us = _time(op, case.inputs(case.tokens(1, 128), state, [0], [128]), 2)
    return {"context": context, "us": us, "us per token": us / 128}


def _moe(rng: np.random.Generator, tokens: int, repeats: int) -> dict[str, object]:
    case = MoeCase(rng, 576, 64, 8, 4, extra=dict(compute="int8"))
    op = CpuOp("PipelinedMoE", **case.attributes)
    us = _time(op, case.pipelined(case.tokens(tokens), [tokens]), max(1, repeats // tokens))
    return {"tokens": tokens, "us": us, "us per token": us / tokens}


def _time(op: CpuOp, inputs: dict[str, np.ndarray], repeats: int) -> float:
    """Microseconds of one run, with everything bound once."""
    op(in_place=True, **inputs)
    binding = op.session.io_binding()
    values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    for output in op.session.get_outputs():
        if output.name in op.state:
            binding.bind_ortvalue_output(output.name, values[op.state[output.name]])
        else:
            binding.bind_output(output.name)
    best = float("inf")
    for _ in range(ROUNDS):
        start = time.thread_time()
        for _ in range(repeats):
            op.session.run_with_iobinding(binding)
        best = min(best, (time.thread_time() - start) / repeats)
    return 1e6 * best


if __name__ == "__main__":
    main()
