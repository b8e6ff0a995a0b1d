"""The operators of the moec dialect, declared once: schemas, bodies and plugin tests are made from this.

Arity is fixed (TensorRT refuses empty optional inputs): what a layer lacks is a dummy plus an attribute.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moec.errors import MoecError
from moec.reference.kv_layout import FORMATS

DOMAIN, VERSION = "moec", 1

AttributeValue = int | float | str
FLOATS = ("float", "float16", "bfloat16")
RINGS = ("float16", "float")


@dataclass(frozen=True)
class Tensor:
    """An input or output.

    Args:
        name: Formal name.
        types: ONNX element types that are allowed; names in `FLOATS` order.
        shape: Symbolic dimensions.
        doc: What it holds.
        group: Tensors of the same group have the same type; None: the tensor's own.
        alias_of: Input that this output shares its memory with (in plain ONNX it is a copy).
    """

    name: str
    types: tuple[str, ...]
    shape: tuple[str, ...]
    doc: str
    group: str | None = None
    alias_of: str | None = None


@dataclass(frozen=True)
class Attribute:
    """An attribute; without a default it is required. The default's (or `kind`'s) Python type is its type."""

    name: str
    kind: type
    doc: str
    default: AttributeValue | None = None
    choices: tuple[str, ...] = ()


@dataclass(frozen=True)
class OpDeclaration:
    """One operator of the domain `moec`, opset version 1."""

    name: str
    doc: str
    inputs: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...]
    attributes: tuple[Attribute, ...]

    def input_index(self, name: str) -> int:
        return [tensor.name for tensor in self.inputs].index(name)

    def complete(self, given: dict[str, Any], where: str | None = None) -> dict[str, AttributeValue]:
        """Attributes with defaults filled in, in declared order.

        Raises:
            MoecError: one is missing, unknown, of another type or not among the choices.
        """
        known = {attribute.name: attribute for attribute in self.attributes}
        unknown = sorted(set(given) - set(known))
        if unknown:
            raise MoecError(f"{self.name} has no attribute {', '.join(unknown)}", where=where)
        return {name: self._value(attribute, given, where) for name, attribute in known.items()}

    def _value(self, attribute: Attribute, given: dict[str, Any], where: str | None) -> AttributeValue:
        value = given.get(attribute.name, attribute.default)
        if isinstance(value, bytes):
            value = value.decode()
        if value is None:
            raise MoecError(f"{self.name} needs the attribute {attribute.name}", where=where)
        try:
            value = attribute.kind(value)
        except (TypeError, ValueError) as error:
            raise MoecError(
                f"{self.name}: {attribute.name}={value!r} has the wrong type", where=where
            ) from error
        if attribute.choices and value not in attribute.choices:
            hint = f"it may be {', '.join(attribute.choices)}"
            raise MoecError(f"{self.name}: {attribute.name} is {value!r}", where=where, hint=hint)
        return value


_ATTENTION = OpDeclaration(
    name="AsymKVAttention",
    doc="Causal attention over a quantized KV cache: appends new tokens, flushes full blocks, attends. The "
    "result does not depend on the chunking. Reference: moec.reference.attention.",
    inputs=(
        Tensor("q", FLOATS, ("b", "S", "Hq", "Dk"), "Queries after RoPE and norms, not scaled.", "T"),
        Tensor("k", FLOATS, ("b", "S", "Hkv", "Dk"), "Keys after RoPE and norms.", "T"),
        Tensor("v", FLOATS, ("b", "S", "Hkv", "Dv"), "Values.", "T"),
        Tensor("blocks", ("int8",), ("B", "Hkv", "NB", "block_bytes"), "Quantized blocks; or [1,1,1,1]."),
        Tensor("ring", RINGS, ("B", "Hkv", "rows", "Dk+Dv"), "Sinks and recent tokens, or all of them.", "R"),
        Tensor("slot_ids", ("int32",), ("b",), "Slot of each row; rows with tokens never share one."),
        Tensor("lengths", ("int32",), ("B",), "Tokens cached in each slot."),
        Tensor("num_tokens", ("int32",), ("b",), "Valid tokens of each row; 0: idle."),
        Tensor("k_mean", ("float",), ("Hkv", "Dk"), "Mean of K, permuted order; 0 with a soft cap."),
        Tensor("k_ref", ("float",), ("Hkv", "Dk"), "Reference of K, powers of two, permuted order."),
        Tensor("k_order", ("int32",), ("Hkv", "Dk"), "Permutation of K's channels, promoted ones first."),
        Tensor("v_ref", ("float",), ("Hkv", "ng"), "Reference of V groups, powers of two."),
        Tensor("sink_logits", ("float",), ("Hq",), "Logit per head that joins the softmax; or zeros."),
    ),
    outputs=(
        Tensor("out", FLOATS, ("b", "S", "Hq*Dv"), "Attention output; zero at padding and idle rows.", "T"),
        Tensor("blocks_out", ("int8",), ("B", "Hkv", "NB", "block_bytes"), "New blocks.", None, "blocks"),
        Tensor("ring_out", RINGS, ("B", "Hkv", "rows", "Dk+Dv"), "New ring.", "R", "ring"),
    ),
    attributes=(
        Attribute("scale", float, "Factor on q.k."),
        Attribute("window", int, "Sliding window in tokens, 0: none.", 0),
        Attribute("softcap", float, "cap*tanh(logit/cap), 0: none.", 0.0),
        Attribute("has_sink_logits", int, "1: sink_logits counts.", 0),
        Attribute("format", str, "KV format.", None, FORMATS),
        Attribute("block_tokens", int, "Tokens of a block.", 64),
        Attribute("promoted", int, "K channels with 4 bits, 0 for layers without blocks.", 0),
        Attribute("sink_tokens", int, "First tokens, kept in fp16.", 16),
        Attribute("recent_tokens", int, "Newest tokens, kept in fp16.", 64),
        Attribute("rollback_tokens", int, "How far lengths may be set back.", 0),
        Attribute("layout", str, "Order of codes in memory.", "rows", ("rows",)),
        Attribute("version", int, "Version of the format.", 1),
        Attribute("layer", int, "Layer number, for messages.", 0),
    ),
)

_HIDDEN = (
    Tensor("hidden", FLOATS, ("T", "H"), "Tokens, T = b*S.", "T"),
    Tensor("num_tokens", ("int32",), ("b",), "Valid tokens of each row; padding is not routed."),
)
_ROUTER = (
    Tensor("router_weight", ("float",), ("E", "H"), "Router."),
    Tensor("router_bias", ("float",), ("E",), "Added to the logits; or zeros."),
    Tensor("selection_bias", ("float",), ("E",), "Added for the choice only; or zeros."),
    Tensor("predictor_weight", ("float",), ("max(P,1)", "H"), "Predictor of a later layer's experts."),
)
_CHOICE = (
    Tensor("ids", ("int32",), ("T", "K"), "Experts of each token."),
    Tensor("weights", ("float",), ("T", "K"), "Their weights."),
)
_STORE = (
    Tensor("experts", ("int8",), ("slots", "blob_bytes"), "Expert blobs."),
    Tensor("residency", ("int32",), ("n",), "Slot table; [1] while num_slots is 0."),
    Tensor("staging", ("int8",), ("m", "staging_bytes"), "Staging slots; [1,1] while num_slots is 0."),
)
_MOE_OUTPUTS = (
    Tensor("out", FLOATS, ("T", "H"), "Weighted sum of experts; zero at padding.", "T"),
    Tensor("residency_out", ("int32",), ("n",), "New slot table.", None, "residency"),
    Tensor("staging_out", ("int8",), ("m", "staging_bytes"), "New staging slots.", None, "staging"),
)
_SIZES = (Attribute("num_experts", int, "E."), Attribute("top_k", int, "K."))
_SCORINGS, _GROUP_SCORES = ("softmax", "sigmoid", "softmax_after_topk"), ("max", "top2")
_ROUTER_ATTRIBUTES = (
    Attribute("scoring", str, "How logits become weights.", "softmax", _SCORINGS),
    Attribute("renormalize", int, "1: divide the chosen weights by their sum.", 0),
    Attribute("num_groups", int, "Groups of experts; 0 or 1: none.", 1),
    Attribute("topk_groups", int, "Groups that experts may be chosen from.", 1),
    Attribute("group_score", str, "Score of a group.", "max", _GROUP_SCORES),
    Attribute("routed_scale", float, "Factor on the final weights.", 1.0),
)
_ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu2", "swiglu_oai")
_EXPERT_ATTRIBUTES = (
    Attribute("activation", str, "Activation of the gate.", "silu", _ACTIVATIONS),
    Attribute("gated", int, "1: act(gate)*up.", 1),
    Attribute("alpha", float, "Sigmoid slope of swiglu_oai.", 1.0),
    Attribute("limit", float, "Clamp of swiglu_oai.", 0.0),
    Attribute("weight_format", str, "Format of the blobs.", None, ("int4", "bf16")),
    Attribute("group_size", int, "Columns that share a scale.", 64),
    Attribute("intermediate_size", int, "I."),
    Attribute("has_bias", int, "1: blobs hold biases.", 0),
    Attribute("tile_layout", str, "Order of weights in a blob.", "rows", ("rows",)),
)
_PREDICTOR_ATTRIBUTES = (Attribute("predictor_rows", int, "P, 0: no predictor.", 0),)
_RUN_ATTRIBUTES = (
    Attribute("horizon", int, "Layers that the predictor looks ahead.", 0),
    Attribute("num_slots", int, "Slots of the pool, 0: all experts are resident.", 0),
    Attribute("compute", str, "Activations of the products.", "fp32", ("fp32", "int8")),
    Attribute("layer", int, "Layer number, for messages.", 0),
    Attribute("version", int, "Version of the format.", 1),
)

_PIPELINED_MOE = OpDeclaration(
    name="PipelinedMoE",
    doc="Router, top-k and experts of a layer; prefetching changes residency, never results. "
    "Reference: moec.reference.moe.pipelined_moe.",
    inputs=_HIDDEN + _ROUTER + _STORE,
    outputs=_MOE_OUTPUTS,
    attributes=_SIZES + _ROUTER_ATTRIBUTES + _EXPERT_ATTRIBUTES + _PREDICTOR_ATTRIBUTES + _RUN_ATTRIBUTES,
)
_EXPERTS = OpDeclaration(
    name="Experts",
    doc="The experts of PipelinedMoE behind a router of its own. Reference: moec.reference.moe.experts.",
    inputs=_HIDDEN + _CHOICE + _STORE,
    outputs=_MOE_OUTPUTS,
    attributes=_SIZES + _EXPERT_ATTRIBUTES + _RUN_ATTRIBUTES,
)

OPS: dict[str, OpDeclaration] = {op.name: op for op in (_ATTENTION, _PIPELINED_MOE, _EXPERTS)}
"""Every operator of the dialect by name."""
