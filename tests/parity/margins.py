"""Which tokens a router could as well send elsewhere: in another order of sums they may go there."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import numpy as np
import onnx_ir as ir
import torch

from moec.bundle.geometry import Geometry, MoELayer
from moec.reference.routing import RouterConfig, route

MARGIN = 1e-5


@contextlib.contextmanager
def recorded(model: torch.nn.Module, geometry: Geometry, graph: ir.Graph) -> Iterator[list[list[np.ndarray]]]:
    """Collects, for each MoE layer, which tokens are `undecided` in each call of the model.

    Args:
        model: The transformers model.
        geometry: Its MoE layers.
        graph: The rewritten graph: its PipelinedMoE nodes say how a layer routes.
    """
    nodes = {n.attributes["layer"].as_int(): n for n in graph if n.op_type == "PipelinedMoE"}
    records, handles = [], []
    for moe in geometry.moe:
        records.append([])
        name = _router_weight(model, moe)
        handles.append(_record(model, name, moe, nodes.get(moe.layer), records[-1]))
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


def _record(model: torch.nn.Module, name: str, moe: MoELayer, node: ir.Node | None, record: list):
    state, owner = dict(model.state_dict()), name.rpartition(".")[0]
    weight = state[name].double()
    config, bias = RouterConfig(moe.num_experts, moe.top_k), torch.zeros(moe.num_experts)
    if node is not None:
        names = ("num_groups", "topk_groups", "group_score", "scoring")
        config = RouterConfig(moe.num_experts, moe.top_k, **{n: node.attributes[n].value for n in names})
        bias = _bias(node.inputs[4], state, bias)

    def hook(_, args):
        logits = args[0].reshape(-1, moe.hidden_size).double() @ weight.T
        record.append(undecided(config, logits.numpy(), bias.numpy()))

    return model.get_submodule(owner).register_forward_pre_hook(hook)


def _bias(value: ir.Value, state: dict[str, torch.Tensor], zeros: torch.Tensor) -> torch.Tensor:
    """The selection bias: a parameter, perhaps reshaped, or zeros."""
    while value.producer() is not None:
        value = value.producer().inputs[0]
    return state[value.name].reshape(-1) if value.name in state else zeros


def undecided(config: RouterConfig, logits: np.ndarray, bias: np.ndarray) -> np.ndarray:
    """Which tokens' experts change when one logit moves by the margin: bool `[T]`."""
    choose = lambda x: np.sort(route(config, x.astype(np.float32), bias)[0], axis=1)  # noqa: E731
    chosen, changed = choose(logits), np.zeros(len(logits), bool)
    for expert in range(config.num_experts):
        for move in (-MARGIN, MARGIN):
            moved = logits.copy()
            moved[:, expert] += move
            changed |= (choose(moved) != chosen).any(axis=1)
    return changed
