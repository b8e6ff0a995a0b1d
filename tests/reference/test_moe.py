from __future__ import annotations

import numpy as np
import pytest
import torch
import transformers
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP
from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
from transformers.models.qwen2_moe.modeling_qwen2_moe import Qwen2MoeSparseMoeBlock

from moec.errors import MoecError
from moec.reference.experts import BlobLayout, ExpertWeights, pack_expert
from moec.reference.moe import experts, pipelined_moe
from tests.helpers.moe_case import expert_attributes, moe_attributes, moe_inputs, state_dummies
from tests.helpers.rng import fresh_rng

SIZES = {"hidden_size": 64, "num_experts_per_tok": 3}
COMMON = {"num_experts": 8, "top_k": 3, "intermediate_size": 48, "weight_format": "bf16"}


def random_module(module: torch.nn.Module, rng: np.random.Generator) -> torch.nn.Module:
    """Fills parameters and buffers with numbers that bf16 holds exactly."""
    for tensor in [*module.parameters(), *module.buffers()]:
        value = rng.standard_normal(tuple(tensor.shape)) / np.sqrt(tensor.shape[-1])
        tensor.data = torch.from_numpy(value).to(torch.bfloat16).float()
    return module.eval()


def blobs_of(module: torch.nn.Module, layout: BlobLayout, transposed: bool = False) -> np.ndarray:
    """Blobs of a transformers experts module, int8 `[E, blob_bytes]`."""
    parameters = {name: value.detach().numpy() for name, value in module.named_parameters()}
    blobs = []
    for e in range(module.num_experts):
        gate_up, down = parameters["gate_up_proj"][e], parameters["down_proj"][e]
        biases = [None, None]
        if transposed:  # gpt_oss: [H, 2I] with gate and up interleaved, biases
            gate_up, down = np.concatenate([gate_up.T[0::2], gate_up.T[1::2]]), down.T
            bias = parameters["gate_up_proj_bias"][e]
            biases = [np.concatenate([bias[0::2], bias[1::2]]), parameters["down_proj_bias"][e]]
        blobs.append(pack_expert(layout, ExpertWeights(gate_up, down, *biases)))
    return np.stack(blobs).view(np.int8)


def run_block(
    gate, module, x: np.ndarray, layout: BlobLayout, router_bias=None, selection=None, **attributes
):
    zeros = np.zeros(8, np.float32)
    return pipelined_moe(
        x, np.array([len(x)], np.int32), gate.weight.detach().numpy(),
        zeros if router_bias is None else router_bias, zeros if selection is None else selection,
        np.zeros((1, 64), np.float32), blobs_of(module, layout, "bias" in str(layout.offsets)),
        *state_dummies().values(), **COMMON, **attributes,
    )[0]  # fmt: skip


def assert_close(out: np.ndarray, want: torch.Tensor) -> None:
    want = want.detach().numpy().reshape(out.shape)
    assert np.abs(out - want).max() <= 1e-5 * np.abs(want).max()


@pytest.fixture
def rng():
    return fresh_rng()


@pytest.fixture
def x(rng):
    return rng.standard_normal((12, 64)).astype(np.float32)


@torch.no_grad()
@pytest.mark.parametrize("renormalize", [False, True])
def test_qwen2_moe(rng, x, renormalize):
    config = transformers.Qwen2MoeConfig(
        **SIZES,
        num_experts=8,
        moe_intermediate_size=48,
        shared_expert_intermediate_size=32,
        norm_topk_prob=renormalize,
    )
    block = random_module(Qwen2MoeSparseMoeBlock(config), rng)
    block.shared_expert.down_proj.weight.zero_()
    out = run_block(block.gate, block.experts, x, BlobLayout("bf16", 64, 48), renormalize=int(renormalize))
    assert_close(out, block(torch.from_numpy(x)[None]))


@torch.no_grad()
def test_mixtral(rng, x):
    config = transformers.MixtralConfig(**SIZES, num_local_experts=8, intermediate_size=48, hidden_act="gelu")
    block = random_module(MixtralSparseMoeBlock(config), rng)
    layout = BlobLayout("bf16", 64, 48)
    out = run_block(block.gate, block.experts, x, layout, renormalize=1, activation="gelu")
    assert_close(out, block(torch.from_numpy(x)[None]))


@torch.no_grad()
def test_deepseek_v3(rng, x):
    config = transformers.DeepseekV3Config(
        **SIZES, n_routed_experts=8, moe_intermediate_size=48, n_shared_experts=1, n_group=4, topk_group=2,
        norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    block = random_module(DeepseekV3MoE(config), rng)
    block.shared_experts.down_proj.weight.zero_()
    out = run_block(
        block.gate, block.experts, x, BlobLayout("bf16", 64, 48), scoring="sigmoid", renormalize=1,
        num_groups=4, topk_groups=2, group_score="top2", routed_scale=2.5,
        selection=block.gate.e_score_correction_bias.numpy(),
    )  # fmt: skip
    assert_close(out, block(torch.from_numpy(x)[None]))


@torch.no_grad()
def test_gpt_oss(rng, x):
    config = transformers.GptOssConfig(
        **SIZES, num_local_experts=8, intermediate_size=48, num_hidden_layers=1
    )
    block = random_module(GptOssMLP(config), rng)
    layout = BlobLayout("bf16", 64, 48, has_bias=True)
    out = run_block(
        block.router, block.experts, x * 4, layout, router_bias=block.router.bias.numpy(), has_bias=1,
        scoring="softmax_after_topk", activation="swiglu_oai", alpha=block.experts.alpha,
        limit=block.experts.limit,
    )  # fmt: skip
    want = block(torch.from_numpy(x * 4)[None])
    assert_close(out, want[0] if isinstance(want, tuple) else want)


def test_padding_is_not_routed_and_rows_do_not_matter_to_each_other(rng):
    attributes = moe_attributes()
    inputs = moe_inputs(rng, attributes, [3, 0, 2], 3)
    inputs["hidden"][3:6] = np.nan
    out = pipelined_moe(**inputs, **attributes)[0]
    assert not out[3:6].any()
    assert not out[8].any()
    alone = inputs | {"hidden": inputs["hidden"][6:7], "num_tokens": np.array([1], np.int32)}
    # BLAS may order the sums of one row in another way than those of many: equal up to float64 rounding.
    assert np.allclose(pipelined_moe(**alone, **attributes)[0], out[6:7], rtol=1e-6, atol=1e-7)


def test_experts_sum_in_choice_order(rng):
    attributes = expert_attributes(moe_attributes())
    inputs = moe_inputs(rng, attributes, [4], 4)
    given = {name: inputs[name] for name in ("hidden", "num_tokens", "experts", "residency", "staging")}
    ids = np.array([[0, 1], [1, 0], [7, 7], [3, 5]], np.int32)
    weights = rng.random((4, 2)).astype(np.float32)
    out = experts(**given, ids=ids, weights=weights, **attributes)[0]
    parts = [
        experts(**given, ids=ids[:, k : k + 1], weights=weights[:, k : k + 1], **attributes | {"top_k": 1})[0]
        for k in range(2)
    ]
    assert np.allclose(out, parts[0] + parts[1], rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize(
    "wrong", [{"num_slots": 4}, {"weight_format": "bf16"}, {"num_experts": 7}, {"version": 2}]
)
def test_what_is_not_there_is_refused(rng, wrong):
    attributes = moe_attributes()
    inputs = moe_inputs(rng, attributes, [1], 1)
    if "num_experts" in wrong:
        inputs |= {name: inputs[name][:7] for name in ("router_weight", "router_bias", "selection_bias")}
    with pytest.raises(MoecError):
        pipelined_moe(**inputs, **(attributes | wrong))


def test_expert_ids_are_checked(rng):
    attributes = expert_attributes(moe_attributes())
    inputs = moe_inputs(rng, attributes, [1], 1)
    given = {name: inputs[name] for name in ("hidden", "num_tokens", "experts", "residency", "staging")}
    with pytest.raises(MoecError, match="out of range"):
        experts(**given, ids=np.array([[0, 8]]), weights=np.ones((1, 2), np.float32), **attributes)
