"""Checkpoints of any size with one bf16 tensor per expert and projection, made at disk speed.

The values are windows into one block of normal numbers: different for every tensor, finite, and free.
"""

from __future__ import annotations

import json
import math
from pathlib import Path

import ml_dtypes
import numpy as np
from transformers import Qwen3MoeConfig

_BLOCK = 1 << 23  # elements
_SHARD_BYTES = 2 << 30


def synthetic_checkpoint(folder: Path, config: Qwen3MoeConfig, seed: int = 0) -> Path:
    """Writes config.json and sharded safetensors of a Qwen3-MoE model; returns the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(folder)
    rng = np.random.default_rng(seed)
    block = (rng.standard_normal(_BLOCK, np.float32) * 0.03).astype(ml_dtypes.bfloat16)
    shards, size = [{}], 0
    for name, shape in _tensors(config):
        if size > _SHARD_BYTES:
            shards.append({})
            size = 0
        shards[-1][name] = shape
        size += 2 * math.prod(shape)
    weight_map = {}
    for number, shapes in enumerate(shards, 1):
        file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
        _write(folder / file, shapes, block, rng)
        weight_map |= dict.fromkeys(shapes, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder


def qwen3_config(hidden: int, inner: int, experts: int, layers: int, vocab: int) -> Qwen3MoeConfig:
    """A Qwen3-MoE of any size; `inner` is an expert's intermediate size."""
    return Qwen3MoeConfig(
        vocab_size=vocab, hidden_size=hidden, intermediate_size=2 * inner, moe_intermediate_size=inner,
        num_hidden_layers=layers, num_attention_heads=8, num_key_value_heads=2, head_dim=64,
        num_experts=experts, num_experts_per_tok=2, max_position_embeddings=4096, decoder_sparse_step=1,
        mlp_only_layers=[], norm_topk_prob=True, tie_word_embeddings=False, dtype="bfloat16",
    )  # fmt: skip


def _tensors(c: Qwen3MoeConfig) -> list[tuple[str, tuple[int, ...]]]:
    h, d = c.hidden_size, c.head_dim
    found = [("model.embed_tokens.weight", (c.vocab_size, h)), ("model.norm.weight", (h,))]
    found.append(("lm_head.weight", (c.vocab_size, h)))
    for layer in range(c.num_hidden_layers):
        p = f"model.layers.{layer}."
        found += [(f"{p}{n}.weight", (h,)) for n in ("input_layernorm", "post_attention_layernorm")]
        found += [(f"{p}self_attn.{n}_norm.weight", (d,)) for n in "qk"]
        heads = dict(q=c.num_attention_heads, k=c.num_key_value_heads, v=c.num_key_value_heads)
        found += [(f"{p}self_attn.{n}_proj.weight", (count * d, h)) for n, count in heads.items()]
        found.append((f"{p}self_attn.o_proj.weight", (h, c.num_attention_heads * d)))
        found.append((f"{p}mlp.gate.weight", (c.num_experts, h)))
        shapes = dict(gate=(c.moe_intermediate_size, h), up=(c.moe_intermediate_size, h))
        shapes["down"] = (h, c.moe_intermediate_size)
        for e in range(c.num_experts):
            found += [(f"{p}mlp.experts.{e}.{n}_proj.weight", shape) for n, shape in shapes.items()]
    return found


def _write(
    path: Path, shapes: dict[str, tuple[int, ...]], block: np.ndarray, rng: np.random.Generator
) -> None:
    header, position = {}, 0
    for name, shape in shapes.items():
        end = position + 2 * math.prod(shape)
        header[name] = {"dtype": "BF16", "shape": shape, "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for shape in shapes.values():
            _write_values(file, math.prod(shape), block, rng)


def _write_values(file, count: int, block: np.ndarray, rng: np.random.Generator) -> None:
    while count:
        part = min(count, _BLOCK // 2)
        start = int(rng.integers(0, _BLOCK - part))
        file.write(block[start : start + part].view(np.uint8).data)
        count -= part
