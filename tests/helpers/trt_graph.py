"""A small rewritten graph (moec dialect, fp32, dense layers standard) with the weights it would have on disk.

It follows the form of `rewritten.onnx`: initializers carry transformers names and no data are needed, since
the engine takes every weight as an input.
"""

from __future__ import annotations

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from moec.reference.kv_layout import KVLayout

HIDDEN, HEADS, KV_HEADS, DIM, VOCAB, EXPERTS, TOP_K, INTER = 128, 4, 2, 64, 256, 8, 2, 64
BATCH, CONTEXT = 4, 512
BLOB = 16384
I32, I8, F32, F16 = TensorProto.INT32, TensorProto.INT8, TensorProto.FLOAT, TensorProto.FLOAT16


class Builder:
    """Collects nodes, inputs, outputs and initializers of one graph."""

    def __init__(self) -> None:
        self.nodes: list[onnx.NodeProto] = []
        self.inputs: list[onnx.ValueInfoProto] = []
        self.outputs: list[onnx.ValueInfoProto] = []
        self.initializers: list[onnx.TensorProto] = []
        self.shapes: list[onnx.ValueInfoProto] = []

    def node(
        self, op: str, inputs: list[str], outputs: list[str] | None = None, domain: str = "", **attrs
    ) -> str:
        outputs = outputs or [f"v{len(self.nodes)}"]
        name = attrs.pop("name", f"{op}_{len(self.nodes)}")
        self.nodes.append(helper.make_node(op, inputs, outputs, name=name, domain=domain, **attrs))
        return outputs[0]

    def weight(self, name: str, shape: list[int]) -> str:
        self.initializers.append(numpy_helper.from_array(np.zeros(shape, np.float32), name))
        return name

    def constant(self, name: str, value: np.ndarray) -> str:
        if name not in {tensor.name for tensor in self.initializers}:
            self.initializers.append(numpy_helper.from_array(np.asarray(value), name))
        return name

    def input(self, name: str, kind: int, shape: list) -> str:
        self.inputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def output(self, name: str, kind: int, shape: list) -> str:
        self.outputs.append(helper.make_tensor_value_info(name, kind, shape))
        return name

    def known(self, name: str, shape: list) -> str:
        """Notes the shape of a float32 value."""
        self.shapes.append(helper.make_tensor_value_info(name, F32, shape))
        return name

    def linear(self, x: str, name: str, rows: int, columns: int) -> str:
        transposed = self.node("Transpose", [self.weight(name, [rows, columns])], perm=[1, 0])
        return self.node("MatMul", [x, transposed])


def layout(kv_format: str = "mkv2", window: int = 0) -> KVLayout:
    return KVLayout(kv_format, KV_HEADS, DIM, DIM, CONTEXT, window=window)


def attention_attributes(kv: KVLayout, layer: int) -> dict:
    return {
        "scale": DIM**-0.5,
        "window": kv.window,
        "softcap": 0.0,
        "has_sink_logits": 0,
        "format": kv.format,
        "block_tokens": kv.block_tokens,
        "promoted": kv.promoted,
        "sink_tokens": kv.sink_tokens,
        "recent_tokens": kv.recent_tokens,
        "rollback_tokens": kv.rollback_tokens,
        "layout": "rows",
        "version": 1,
        "layer": layer,
    }


def expert_attributes(layer: int) -> dict:
    return {
        "num_experts": EXPERTS,
        "top_k": TOP_K,
        "activation": "silu",
        "gated": 1,
        "alpha": 1.0,
        "limit": 0.0,
        "weight_format": "int4",
        "group_size": 64,
        "intermediate_size": INTER,
        "has_bias": 0,
        "tile_layout": "rows",
        "num_slots": 0,
        "compute": "int8",
        "layer": layer,
        "version": 1,
    }


def router_attributes() -> dict:
    return {
        "scoring": "softmax",
        "renormalize": 1,
        "num_groups": 1,
        "topk_groups": 1,
        "group_score": "max",
        "routed_scale": 1.0,
        "predictor_rows": 0,
        "horizon": 0,
    }


def blob_bytes() -> int:
    """Bytes of one int4 expert blob of this geometry (INTERFACES: sections at 128, blob at 4096)."""
    groups_h, groups_i = -(-HIDDEN // 64), -(-INTER // 64)
    sections = [
        2 * INTER * groups_h * 32,
        2 * INTER * groups_h * 2,
        HIDDEN * groups_i * 32,
        HIDDEN * groups_i * 2,
    ]
    return -(-sum(-(-size // 128) * 128 for size in sections) // 4096) * 4096


def _attention(g: Builder, layer: int, x: str, rope: tuple[str, str], kv: KVLayout) -> str:
    prefix = f"model.layers.{layer}.self_attn."
    heads = {"q": HEADS, "k": KV_HEADS, "v": KV_HEADS}
    states = {}
    for name, count in heads.items():
        y = g.linear(x, f"{prefix}{name}_proj.weight", count * DIM, HIDDEN)
        states[name] = g.node("Reshape", [y, g.constant(f"shape_{count}", np.array([0, 0, count, DIM]))])
    for name in ("q", "k"):
        moved = g.node("Transpose", [states[name]], perm=[0, 2, 1, 3])
        turned = g.node("RotaryEmbedding", [moved, *rope])
        states[name] = g.node("Transpose", [turned], perm=[0, 2, 1, 3])
    blocks, ring = kv.blocks_shape(BATCH), kv.ring_shape(BATCH)
    ring_type = F32 if kv.format == "fp32" else F16
    kv_inputs = [
        g.input(f"kv.{layer}.blocks", I8, blocks),
        g.input(f"kv.{layer}.ring", ring_type, ring),
        "slot_ids",
        "lengths",
        "num_tokens",
        g.input(f"kv.{layer}.k_mean", F32, [KV_HEADS, DIM]),
        g.input(f"kv.{layer}.k_ref", F32, [KV_HEADS, DIM]),
        g.input(f"kv.{layer}.k_order", I32, [KV_HEADS, DIM]),
        g.input(f"kv.{layer}.v_ref", F32, [KV_HEADS, DIM // kv.v_group]),
        g.constant("no_sink_logits", np.zeros(HEADS, np.float32)),
    ]
    outputs = [f"attn.{layer}", f"kv.{layer}.blocks.out", f"kv.{layer}.ring.out"]
    g.output(outputs[1], I8, blocks)
    g.output(outputs[2], ring_type, ring)
    g.node(
        "AsymKVAttention",
        [states["q"], states["k"], states["v"], *kv_inputs],
        outputs,
        "moec",
        name=f"attention_{layer}",
        **attention_attributes(kv, layer),
    )
    return g.linear(outputs[0], f"{prefix}o_proj.weight", HIDDEN, HEADS * DIM)


def _moe(g: Builder, layer: int, x: str) -> str:
    flat = g.node("Reshape", [x, g.constant("flat", np.array([-1, HIDDEN]))])
    outputs = [f"moe.{layer}", f"moe.{layer}.residency.out", f"moe.{layer}.staging.out"]
    inputs = [
        flat,
        "num_tokens",
        g.weight(f"model.layers.{layer}.mlp.gate.weight", [EXPERTS, HIDDEN]),
        g.constant("no_bias", np.zeros(EXPERTS, np.float32)),
        g.constant("no_bias", np.zeros(EXPERTS, np.float32)),
        g.constant("no_predictor", np.zeros((1, HIDDEN), np.float32)),
        g.input(f"moe.{layer}.experts", I8, [EXPERTS, blob_bytes()]),
        g.constant("no_residency", np.zeros(1, np.int32)),
        g.constant("no_staging", np.zeros((1, 1), np.int8)),
    ]
    attributes = {**expert_attributes(layer), **router_attributes()}
    g.node("PipelinedMoE", inputs, outputs, "moec", name=f"moe_{layer}", **attributes)
    return g.node("Reshape", [outputs[0], g.node("Shape", [x])])


def _rope(g: Builder) -> tuple[str, str]:
    """cos and sin [b, S, DIM/2] of positions lengths[slot] + i."""
    start = g.node("Unsqueeze", [g.node("Gather", ["lengths", "slot_ids"]), g.constant("one", np.array([1]))])
    count = g.node("Shape", ["input_ids"], start=1, end=2)
    count = g.node("Squeeze", [count])
    steps = g.node("Range", [g.constant("i0", np.array(0)), count, g.constant("i1", np.array(1))])
    positions = g.node("Add", [start, g.node("Cast", [steps], to=I32)])
    positions = g.node("Unsqueeze", [g.node("Cast", [positions], to=F32), g.constant("two", np.array([2]))])
    frequencies = (10000.0 ** (-np.arange(0, DIM, 2) / DIM)).astype(np.float32)
    angles = g.node("Mul", [positions, g.constant("inv_freq", frequencies)])
    return g.node("Cos", [angles]), g.node("Sin", [angles])


def _logits(g: Builder, x: str) -> None:
    """Logits of the last valid token of each row."""
    last = g.node("Sub", ["num_tokens", g.constant("i32_1", np.array(1, np.int32))])
    last = g.node("Max", [last, g.constant("i32_0", np.array(0, np.int32))])
    last = g.node("Unsqueeze", [last, g.constant("one", np.array([1]))])
    picked = g.node("GatherND", [x, g.node("Cast", [last], to=TensorProto.INT64)], batch_dims=1)
    table = g.node("Transpose", ["model.embed_tokens.weight"], perm=[1, 0])
    g.node("MatMul", [picked, table], ["logits"])


def rewritten(layers: int = 2, kv_format: str = "mkv2", window: int = 0) -> onnx.ModelProto:
    """A decoder of `layers` layers whose layer 1 is windowed where `window` is not 0."""
    g = Builder()
    g.input("input_ids", I32, ["b", "S"])
    g.input("slot_ids", I32, ["b"])
    g.input("lengths", I32, [BATCH])
    g.input("num_tokens", I32, ["b"])
    g.output("logits", F32, ["b", VOCAB])
    rows = ["b", "S", HIDDEN]
    x = g.node("Gather", [g.weight("model.embed_tokens.weight", [VOCAB, HIDDEN]), "input_ids"])
    g.known(x, rows)
    rope = _rope(g)
    for layer in range(layers):
        norm = g.weight(f"model.layers.{layer}.input_layernorm.weight", [HIDDEN])
        h = g.node("RMSNormalization", [x, norm], epsilon=1e-5)
        kv = layout(kv_format, window if layer == 1 else 0)
        x = g.known(g.node("Add", [x, g.known(_attention(g, layer, h, rope, kv), rows)]), rows)
        norm = g.weight(f"model.layers.{layer}.post_attention_layernorm.weight", [HIDDEN])
        h = g.node("RMSNormalization", [x, norm], epsilon=1e-5)
        x = g.known(g.node("Add", [x, g.known(_moe(g, layer, h), rows)]), rows)
    x = g.node("RMSNormalization", [x, g.weight("model.norm.weight", [HIDDEN])], epsilon=1e-5)
    _logits(g, x)
    graph = helper.make_graph(g.nodes, "decoder", g.inputs, g.outputs, g.initializers, value_info=g.shapes)
    opsets = [helper.make_opsetid("", 24), helper.make_opsetid("moec", 1)]
    model = helper.make_model(graph, opset_imports=opsets)
    model.ir_version = 11
    return model
