"""Watches the routers of transformers' models for ties."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import numpy as np
import onnx_ir as ir
import torch

from moec.bundle.geometry import Geometry, MoELayer
from moec.reference.routing import RouterConfig
from tests.helpers.ties import Pattern, chosen, undecided


@contextlib.contextmanager
def recorded(
    model: torch.nn.Module, geometry: Geometry, graph: Iterable[ir.Node], margin: float
) -> Iterator[list[list[np.ndarray]]]:
    """Collects, for each MoE layer, which tokens are `undecided` in each call of the model.

    Args:
        model: The transformers model.
        geometry: Its MoE layers.
        graph: The rewritten graph: its PipelinedMoE nodes say how a layer routes.
        margin: How far a router's logit may move.
    """
    nodes = {n.attributes["layer"].as_int(): n for n in graph if n.op_type == "PipelinedMoE"}
    records, handles = [], []
    for moe in geometry.moe:
        records.append([])
        handles.append(_record(model, moe, _pattern(model, moe, nodes.get(moe.layer)), margin, records[-1]))
    try:
        yield records
    finally:
        for handle in handles:
            handle.remove()


def _router_weight(model: torch.nn.Module, moe: MoELayer) -> str:
    """The only matrix of E rows beside the experts, or else of that layer."""
    layer = moe.down[: moe.down.index(f".{moe.layer}.") + len(f".{moe.layer}.")]
    shape = (moe.num_experts, moe.hidden_size)
    experts = moe.down.rpartition(".")[0]
    names = [n for n, p in model.named_parameters() if n.startswith(layer) and tuple(p.shape) == shape]
    names = [n for n in names if not n.startswith(experts)]
    beside = [n for n in names if n.startswith(experts.rpartition(".")[0] + ".")]
    assert len(beside or names) == 1, names
    return (beside or names)[0]


def _record(model: torch.nn.Module, moe: MoELayer, pattern: Pattern, margin: float, record: list):
    name = _router_weight(model, moe)
    weight = model.state_dict()[name].double()

    def hook(_, args):
        logits = args[0].reshape(-1, moe.hidden_size).double() @ weight.T
        record.append(undecided(pattern, logits.numpy(), margin))

    return model.get_submodule(name.rpartition(".")[0]).register_forward_pre_hook(hook)


def _pattern(model: torch.nn.Module, moe: MoELayer, node: ir.Node | None) -> Pattern:
    """What a layer's router decides."""
    if model.config.model_type == "phimoe":
        return lambda logits, _: sparse_mixer(logits, model.config.router_jitter_noise)
    config, bias = RouterConfig(moe.num_experts, moe.top_k), torch.zeros(moe.num_experts)
    if node is not None:
        names = ("num_groups", "topk_groups", "group_score", "scoring")
        config = RouterConfig(moe.num_experts, moe.top_k, **{n: node.attributes[n].value for n in names})
        bias = _bias(node.inputs[4], dict(model.state_dict()), bias)
    return chosen(config, bias.float().numpy())


def sparse_mixer(logits: np.ndarray, jitter: float) -> np.ndarray:
    """Phi-MoE's two experts, and which others are near enough to each to share in its weight: `[T,2+2E]`."""
    taken, near = [], []
    for _ in range(2):
        left = logits.copy()
        for done in taken:
            np.put_along_axis(left, done, -np.inf, axis=1)
        taken.append(left.argmax(1)[:, None])
        best = left.max(1, keepdims=True)
        near.append((best - logits) / np.maximum(np.abs(logits), best) <= 2 * jitter)
    return np.concatenate([*taken, *near], axis=1)


def _bias(value: ir.Value, state: dict[str, torch.Tensor], zeros: torch.Tensor) -> torch.Tensor:
    """The selection bias: a parameter, perhaps reshaped, or zeros."""
    while value.producer() is not None:
        value = value.producer().inputs[0]
    return state[value.name].reshape(-1) if value.name in state else zeros
