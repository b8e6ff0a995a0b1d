"""What moec needs to know of a model's shapes: one record per attention layer and per MoE layer.

The frontend fills it while it captures a model; packers, calibrator, rewrite and runtime read it; the
manifest stores it as JSON (`Geometry.to_json` / `Geometry.from_json`, an exact round trip).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from moec.errors import MoecError

_T = TypeVar("_T")


@dataclass(frozen=True)
class AttentionLayer:
    """One attention layer.

    Attributes:
        layer: Index among the decoder layers.
        num_heads: Query heads (Hq).
        num_kv_heads: Key/value heads (Hkv), a divisor of `num_heads`.
        k_dim: Channels of a query or key head (Dk).
        v_dim: Channels of a value head (Dv).
        scale: Factor on the logits, usually Dk**-0.5.
        window: Sliding window in tokens, the newest included; 0 = full attention.
        softcap: Logit soft cap; 0 = none.
        has_sink_logits: The softmax has one extra learned logit a head (GPT-OSS).
    """

    layer: int
    num_heads: int
    num_kv_heads: int
    k_dim: int
    v_dim: int
    scale: float
    window: int = 0
    softcap: float = 0.0
    has_sink_logits: bool = False


@dataclass(frozen=True)
class MoELayer:
    """One layer of routed experts, and where its weights are.

    Attributes:
        layer: Index among the decoder layers.
        num_experts, top_k: Experts there are, and experts each token uses.
        hidden_size, intermediate_size: H and I of one expert.
        activation: silu | gelu | gelu_tanh | relu2 | swiglu_oai.
        gated: act(gate) * up; otherwise act(up).
        has_bias: Experts have biases.
        gate_up, down, gate_up_bias, down_bias: transformers parameter names of the fused tensors,
            `[E, 2I, H]` (`[E, I, H]` when not gated), `[E, H, I]`, `[E, 2I]`, `[E, H]`.
        transposed: The weights are stored `[E, H, 2I]` and `[E, I, H]`.
        interleaved: Gate and up rows alternate (gate0, up0, gate1, ...), not gate rows first.
        alpha, limit: Constants of swiglu_oai.
    """

    layer: int
    num_experts: int
    top_k: int
    hidden_size: int
    intermediate_size: int
    activation: str
    gated: bool
    has_bias: bool
    gate_up: str
    down: str
    gate_up_bias: str | None = None
    down_bias: str | None = None
    transposed: bool = False
    interleaved: bool = False
    alpha: float = 1.0
    limit: float = 0.0


@dataclass(frozen=True)
class StateTensor:
    """A recurrent state of a linear-attention or convolution layer: float32 `[B, *shape]`, zero at length 0.

    Attributes:
        layer: Index among the decoder layers.
        name: conv0, conv1, ... (the last tokens before a convolution) | recurrent.
        shape: Without the slots' axis.
    """

    layer: int
    name: str
    shape: tuple[int, ...]

    @property
    def input(self) -> str:
        """Name of the graph input; its output has ".out" appended."""
        return f"state.{self.layer}.{self.name}"


@dataclass(frozen=True)
class Geometry:
    """The model's shapes. `max_context` is what the model allows, in tokens."""

    model_type: str
    vocab_size: int
    hidden_size: int
    max_context: int
    attention: tuple[AttentionLayer, ...]
    moe: tuple[MoELayer, ...]
    states: tuple[StateTensor, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """A tree of plain JSON values."""
        tree = dataclasses.asdict(self)
        states = [{**state, "shape": list(state["shape"])} for state in tree["states"]]
        return {**tree, "attention": list(tree["attention"]), "moe": list(tree["moe"]), "states": states}

    @classmethod
    def from_json(cls, tree: Mapping[str, Any]) -> Geometry:
        """The inverse of `to_json`; keys of a newer minor version are ignored."""
        fields = dict(tree)
        fields["attention"] = tuple(from_fields(AttentionLayer, x) for x in fields.get("attention", ()))
        fields["moe"] = tuple(from_fields(MoELayer, x) for x in fields.get("moe", ()))
        states = ({**x, "shape": tuple(x["shape"])} for x in fields.get("states", ()))
        fields["states"] = tuple(from_fields(StateTensor, x) for x in states)
        return from_fields(cls, fields)


def from_fields(cls: type[_T], fields: Mapping[str, Any]) -> _T:
    """A dataclass from a mapping: unknown keys are dropped, a missing one is a MoecError."""
    known = {f.name for f in dataclasses.fields(cls)}  # type: ignore[arg-type]
    try:
        return cls(**{name: value for name, value in fields.items() if name in known})
    except TypeError as error:
        raise MoecError(f"{cls.__name__} cannot be read: {error}", hint="Build the bundle again.") from None
