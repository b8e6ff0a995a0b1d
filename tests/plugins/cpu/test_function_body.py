"""What runs a moec node on a CPU: the generated function body against the native kernel."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from moec.reference.kv_cache import KVLayout
from tests.helpers.attention_case import AttentionCase
from tests.helpers.cpu_op import CpuOp
from tests.helpers.moe_case import moe_attributes, moe_inputs
from tests.helpers.rng import fresh_rng
from tests.helpers.single_op import FunctionOp


def _relative(got: np.ndarray, want: np.ndarray) -> float:
    return float(np.abs(got - want).max() / np.abs(want).max())


def _step(case: AttentionCase, op: Callable, tokens: tuple, counts: list[int]) -> np.ndarray:
    """Runs rows 0 and 1 on slots 2 and 0; the attributes are in the op already."""
    names = list(case.inputs(*tokens, [2, 0], counts))
    return case.run(lambda **given: op(**{n: given[n] for n in names}), *tokens, slots=[2, 0], counts=counts)


@pytest.mark.parametrize("cache", ["mkv2", "mkv2_lean", "k4v2", "int8", "fp16", "fp32"])
def test_attention(cache):
    case = AttentionCase(fresh_rng(), KVLayout(cache, 3, 64, 64, 300), 9, layer=0)
    twin = case.twin()
    body, kernel = (op("AsymKVAttention", **case.attributes) for op in (FunctionOp, CpuOp))
    for counts in ([100, 37], [64, 0], [1, 1], [63, 64], [1, 1]):
        tokens = case.tokens(2, max(counts))
        assert _relative(_step(twin, kernel, tokens, counts), _step(case, body, tokens, counts)) <= 1e-5
    # Slot 1 was never used: its random bytes are no state, but neither may have touched them.
    assert case.state_bytes() == twin.state_bytes()


@pytest.mark.parametrize(
    ("weights", "compute", "bound"), [("bf16", "fp32", 1e-5), ("int4", "fp32", 1e-5), ("int4", "int8", 1e-3)]
)
def test_experts(weights, compute, bound):
    attributes = moe_attributes(weight_format=weights, compute=compute, top_k=3)
    inputs = moe_inputs(fresh_rng(), attributes, [7, 0, 4], 8)
    want = FunctionOp("PipelinedMoE", **attributes)(**inputs)[0]
    got = CpuOp("PipelinedMoE", **attributes)(**inputs)[0]
    assert np.array_equal(got.any(axis=1), want.any(axis=1))  # padding and the idle row are zero in both
    error = np.sqrt(((got - want) ** 2).mean() / (want**2).mean())
    assert error <= bound
