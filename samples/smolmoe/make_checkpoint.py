"""Make the sample checkpoint: `python -m samples.smolmoe.make_checkpoint`.

A Hugging Face Qwen2-MoE folder made of SmolLM2-135M-Instruct: every FFN becomes a shared expert of 1024
neurons and 8 routed experts of 64, 4 of them chosen. Neuron groups and routers come from routers.npz
(train_router.py), and so do a factor for every neuron and a change of rank 2 for down_proj; all else is the
dense model's. The same inputs give the same bytes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from samples.smolmoe.routed import Routers
from samples.smolmoe.source import Dense, build_tokenizer, load_dense
from samples.smolmoe.split import EXPERT_NEURONS, NUM_EXPERTS, SHARED, SHARED_NEURONS, TOP_K

HERE = Path(__file__).parent
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
# As the makers of SmolLM2-Instruct advise; a model this small repeats itself without the penalty.
SAMPLING = {"do_sample": True, "temperature": 0.2, "top_p": 0.9, "repetition_penalty": 1.1}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--output", type=Path, default=HERE / "checkpoint")
    options = parser.parse_args()
    if (options.output / "config.json").exists():
        print(f"{os.path.relpath(options.output)} is already there")
        return
    make(options.output)
    size = sum(file.stat().st_size for file in options.output.iterdir())
    print(f"wrote {os.path.relpath(options.output)}: {size / 1e6:.0f} MB")


def make(output: Path) -> None:
    """Write the checkpoint folder; it appears at `output` only when it is complete."""
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    dense = load_dense()
    routers = Routers.load(HERE / "routers.npz")
    save_file(dict(tensors(dense, routers)), partial / "model.safetensors", metadata={"format": "pt"})
    for name, content in json_files(dense).items():
        (partial / name).write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    (partial / "chat_template.jinja").write_text(dense.chat_template, encoding="utf-8")
    build_tokenizer(dense).save(str(partial / "tokenizer.json"))
    os.replace(partial, output)


def tensors(dense: Dense, routers: Routers) -> Iterator[tuple[str, np.ndarray]]:
    """Every checkpoint tensor, bfloat16, under the names of the published Qwen2-MoE checkpoints."""
    for name, values in dense.weights.items():
        if ".mlp." not in name:
            yield name, _bf16(values)
    for layer, routing in enumerate(routers.layers()):
        groups, router, shared_gate, scale, down_in, down_out = (part.numpy() for part in routing)
        prefix = f"model.layers.{layer}.mlp."
        gate, up, down = (dense.weights[f"{prefix}{name}.weight"] for name in PROJECTIONS)
        for name, values in _mlp((gate, up, (down + down_out.T @ down_in) * scale), groups):
            yield prefix + name, _bf16(values)
        yield prefix + "gate.weight", _bf16(router)
        yield prefix + "shared_expert_gate.weight", _bf16(shared_gate[None])


def _mlp(ffn: tuple[np.ndarray, ...], groups: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """The chosen weights sum to 1 and the shared gate is 1/2 at rest, so down_proj grows by 4 and by 2."""
    names = [f"experts.{e}" for e in range(NUM_EXPERTS)] + ["shared_expert"]
    gate, up, down = ffn
    for group, name in enumerate(names):
        own = groups == group
        factor = 2 if group == SHARED else TOP_K
        for part, values in zip(PROJECTIONS, (gate[own], up[own], down[:, own] * factor), strict=True):
            yield f"{name}.{part}.weight", values


def json_files(dense: Dense) -> dict[str, dict]:
    """config.json, generation_config.json and tokenizer_config.json."""
    common = dense.config()
    ends = {key: common[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}
    return {
        "config.json": _model_config(common),
        "generation_config.json": {**ends, **SAMPLING},
        "tokenizer_config.json": _tokenizer_config(dense, ends),
    }


def _model_config(common: dict[str, object]) -> dict[str, object]:
    return {
        "architectures": ["Qwen2MoeForCausalLM"],
        "model_type": "qwen2_moe",
        **common,
        "dtype": "bfloat16",
        "hidden_act": "silu",
        "qkv_bias": False,
        "moe_intermediate_size": EXPERT_NEURONS,
        "shared_expert_intermediate_size": SHARED_NEURONS,
        "num_experts": NUM_EXPERTS,
        "num_experts_per_tok": TOP_K,
        "norm_topk_prob": True,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "use_sliding_window": False,
    }


def _tokenizer_config(dense: Dense, ends: dict[str, object]) -> dict[str, object]:
    tokens = dense.fields["tokenizer.ggml.tokens"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokens[ends["bos_token_id"]],
        "eos_token": tokens[ends["eos_token_id"]],
        "pad_token": tokens[ends["pad_token_id"]],
        "unk_token": tokens[dense.fields["tokenizer.ggml.unknown_token_id"]],
        "add_bos_token": False,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
        "model_max_length": dense.field("context_length"),
        "chat_template": dense.chat_template,
    }


def _bf16(values: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values).astype(ml_dtypes.bfloat16)


if __name__ == "__main__":
    main()
