"""Random configurations of both ops, with undefined behaviour trapped by the host compiler."""

import numpy as np
import pytest

from moec.reference.experts import ACTIVATIONS
from moec.reference.kv_cache import KVLayout
from tests.helpers.kernels import library
from tests.helpers.kv_cases import check_step, make_case, make_step
from tests.plugins.kernels.test_moe import check_layer, make_layer

DIMS = (16, 32, 48, 64, 80, 96, 128, 192, 256)
TRAPS = ("-fsanitize=undefined", "-fno-sanitize-recover=all")


@pytest.fixture(scope="module")
def trapped():
    """The kernels; a misaligned access, a shift or an index out of range ends the process."""
    return library(flags=TRAPS)


def random_layout(rng):
    k_dim = int(rng.choice(DIMS))
    window = int(rng.choice([0, 0, 0, 17, 64, 100]))
    return KVLayout(
        str(rng.choice(["mkv2", "mkv2", "mkv2_lean", "k4v2", "int8", "fp16"])),
        int(rng.integers(1, 4)),
        k_dim,
        int(rng.choice([k_dim, rng.choice(DIMS)])),
        context=500,
        window=window,
        sink_tokens=int(rng.choice([0, 4, 16])),
        recent_tokens=int(rng.choice([1, 32, 64, 100])),
        rollback_tokens=int(rng.choice([0, 3])),
    )


def random_case(rng):
    layout = random_layout(rng)
    lengths = rng.integers(0, 450, 3).tolist()
    heads = layout.num_kv_heads * int(rng.integers(1, 17))
    softcap = float(rng.choice([0.0, 0.0, 5.0]))
    options = {"dtype": str(rng.choice(["fp16", "bf16"])), "softcap": softcap, "sinks": bool(rng.integers(2))}
    return make_case(rng, layout, heads, lengths, **options)


@pytest.mark.slow
@pytest.mark.parametrize("_", range(60))
def test_attention(trapped, rng, _):
    case = random_case(rng)
    print(case.layout, case.attrs, case.lengths)
    for chunk in (1, int(rng.integers(2, 20)), 1):
        rows = int(rng.integers(1, 4))
        step = make_step(
            rng, case, rng.permutation(3)[:rows].tolist(), rng.integers(0, chunk + 1, rows).tolist(), chunk
        )
        case = check_step(trapped, case, step, int(rng.integers(3)), int(rng.integers(1 << 30)))


@pytest.mark.slow
@pytest.mark.parametrize("_", range(60))
def test_moe(trapped, rng, _):
    activation = str(rng.choice(ACTIVATIONS))
    groups = int(rng.choice([1, 2, 4]))
    layer = make_layer(
        rng,
        num_experts=int(rng.choice([4, 8, 12, 40])),
        top_k=int(rng.integers(1, 3)),
        activation=activation,
        gated=1 if activation == "swiglu_oai" else int(rng.integers(2)),
        alpha=1.702,
        limit=2.0,
        weight_format=str(rng.choice(["int4", "bf16"])),
        has_bias=int(rng.integers(2)),
        intermediate_size=int(rng.integers(1, 300)),
        hidden_size=int(rng.integers(1, 300)),
        scoring=str(rng.choice(["softmax", "sigmoid", "softmax_after_topk"])),
        renormalize=int(rng.integers(2)),
        num_groups=groups,
        topk_groups=max(2, groups // 2) if groups > 1 else 1,
        group_score=str(rng.choice(["max", "top2"])),
        routed_scale=float(np.float32(rng.uniform(0.5, 3))),
        dtype=str(rng.choice(["fp16", "bf16"])),
        num_tokens=tuple(rng.integers(0, 4, 2).tolist()),
    )
    print(layer[0])
    check_layer(trapped, rng, *layer)
