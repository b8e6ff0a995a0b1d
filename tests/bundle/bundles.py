"""A small bundle for the tests of this folder: random bytes for weights, a true manifest."""

from __future__ import annotations

import random
from pathlib import Path

from moec.bundle.geometry import AttentionLayer, Geometry, MoELayer
from moec.bundle.manifest import Binding, Manifest, ModelIdentity, TokenizerFacts
from moec.bundle.writer import BundleWriter
from moec.reference.kv_layout import KVLayout


def small_geometry() -> Geometry:
    attention = tuple(AttentionLayer(i, 4, 2, 64, 64, 0.125, window=8 * (i == 0)) for i in range(2))
    moe = (MoELayer(1, 8, 2, 64, 48, "silu", True, False, "m.1.gate_up", "m.1.down"),)
    return Geometry("qwen2_moe", 512, 64, 1024, attention, moe)


def small_manifest(name: str = "model") -> Manifest:
    return Manifest(
        model=ModelIdentity(name, "qwen2_moe", "0123456789abcdef"),
        geometry=small_geometry(),
        context=512,
        batch=2,
        kv={0: KVLayout("mkv2", 2, 64, 64, 512, window=8), 1: KVLayout("mkv2", 2, 64, 64, 512)},
        weights_format="int4",
        experts_format="bf16",
        group_size=64,
        inputs=(Binding("input_ids", "int32", ("b", "S"), "request"),),
        outputs=(Binding("kv.0.ring.out", "float16", (2, 2, 8, 128), "cache", "kv.0.ring"),),
        tokenizer=TokenizerFacts((2, 3), None, True, True),
        moec_version="0.1.0",
        generation={"top_p": 0.9, "do_sample": True},
        sizes={"dense": 5},
        options={"kv": "mkv2", "context": None},
    )


def write_bundle(path: Path, rng: random.Random, name: str = "model") -> Manifest:
    """Four files; of experts.moex only the first 512 bytes are covered by the manifest."""
    with BundleWriter(path) as writer:
        (writer.folder / "weights.safetensors").write_bytes(rng.randbytes(3000))
        (writer.folder / "model.onnx").write_bytes(rng.randbytes(700))
        (writer.folder / "experts.moex").write_bytes(rng.randbytes(1500))
        (writer.folder / "tokenizer").mkdir()
        (writer.folder / "tokenizer" / "tokenizer.json").write_text("{}")
        return writer.finish(small_manifest(name), {"experts.moex": 512})
