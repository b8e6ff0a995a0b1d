"""A GGUF model as a checkpoint: configuration and tokenizer through transformers, weights by name.

transformers would dequantize the whole model into memory; here one tensor, or one expert of it, is
dequantized when it is asked for.
"""

from __future__ import annotations

import contextlib
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from moec.checkpoint.folder import Checkpoint
from moec.checkpoint.gguf_file import GgufFile
from moec.errors import MoecError

ARCHITECTURES = {
    "llama": "mixtral",
    "qwen2moe": "qwen2_moe",
    "qwen3moe": "qwen3_moe",
    "gpt-oss": "gpt_oss",
    "minimax-m2": "minimax_m2",
}
"""llama.cpp's name -> model type; for others transformers 5.24 makes no configuration of GGUF metadata."""
_EXPERTS = re.compile(r"model\.layers\.(\d+)\.(?:mlp|block_sparse_moe)\.experts\.(gate_up|down)_proj(_bias)?")
_CORRECTION = re.compile(r"model\.layers\.(\d+)\..*e_score_correction_bias")


class GgufCheckpoint(Checkpoint):
    """A checkpoint over a GGUF file; `path` is a temporary folder with its config and tokenizer.

    Raises:
        MoecError: an architecture that is not supported, a dense model, or tensors that are missing.
    """

    def __init__(self, gguf: GgufFile) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="moec-gguf-")
        folder = Path(self._folder.name) / gguf.path.stem
        folder.mkdir()
        config = _config(gguf)
        config.save_pretrained(folder)
        _save_tokenizer(gguf, folder)
        super().__init__(folder, config, [])
        self.gguf = gguf
        self._names = _tensor_names(self)
        self._tied = {k: v for k, v in self._meta.all_tied_weights_keys.items() if not self._has(k)}

    def _has(self, name: str) -> bool:
        names = self._names.get(name, ())
        return bool(names) and all(n in self.gguf.names for n in names)

    def check(self, weights: bool = True) -> None:
        super().check(weights=False)
        missing = [n for n in self._shapes if not self._has(self.canonical(n))] if weights else []
        if missing:
            names = self._names.get(missing[0]) or ("that name in GGUF",)
            where = str(self.gguf.path)
            raise MoecError(f"the GGUF file has no tensor for {missing[0]} ({names[0]})", where=where)

    def _read(self, name: str, expert: int | None) -> np.ndarray:
        name = self.canonical(name)
        array = self._restore(name, [self.gguf.tensor(n, expert) for n in self._names[name]], expert)
        want = self._shapes[name] if expert is None else self._shapes[name][1:]
        if array.shape != want:
            what = f"{name} has shape {array.shape} in the file, {want} by its config"
            raise MoecError(what, where=str(self.gguf.path))
        return array

    def _restore(self, name: str, parts: list[np.ndarray], expert: int | None) -> np.ndarray:
        """What llama.cpp's converter did, undone."""
        match = _EXPERTS.fullmatch(name)
        if match is not None:
            axis = 0 if expert is not None else 1
            return (
                _gpt_oss(parts, axis) if self.config.model_type == "gpt_oss" else np.concatenate(parts, axis)
            )
        array = parts[0]
        if self.gguf.architecture == "llama" and re.search(r"\.[qk]_proj\.weight$", name):
            heads = "num_attention_heads" if ".q_proj." in name else "num_key_value_heads"
            return _unpermuted(array, getattr(self.config, heads))
        return array.reshape(self._shapes[name]) if array.size == np.prod(self._shapes[name]) else array

    def load_torch(self, dtype: Any = None, **kwargs: Any) -> Any:
        """The real model with its weights, made tensor by tensor."""
        import torch

        from moec.checkpoint.arrays import to_torch

        options = {"attn_implementation": "eager", **kwargs}
        model = self.skeleton(dtype, **options)
        for name in self.param_names():
            module = model.get_submodule(name.rpartition(".")[0])
            value = to_torch(np.array(self.param(name))).to(dtype or torch.float32)
            if name.rpartition(".")[2] in module._parameters:
                value = torch.nn.Parameter(value, requires_grad=False)
            setattr(module, name.rpartition(".")[2], value)
        model.tie_weights()
        return model.eval()


def open_gguf(path: Path, weights: bool = True) -> GgufCheckpoint:
    """Opens a GGUF model; see `open_checkpoint`."""
    checkpoint = GgufCheckpoint(GgufFile(path))
    checkpoint.check(weights)
    return checkpoint


def _config(gguf: GgufFile) -> Any:
    from transformers import AutoConfig

    from moec.checkpoint.skeleton import quiet

    arch, where = gguf.architecture, str(gguf.path)
    if arch not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        what = f"GGUF architecture {arch!r} is not supported"
        raise MoecError(what, where=where, hint=f"transformers has configurations for {known}.")
    if not gguf.field(f"{arch}.expert_count"):
        raise MoecError(f"this {arch} model is not a Mixture-of-Experts model", where=where)
    if arch == "gpt-oss":
        return _gpt_oss_config(gguf)
    try:
        with quiet():
            config = AutoConfig.from_pretrained(gguf.path.parent, gguf_file=gguf.path.name)
    except Exception as error:  # transformers raises many types for bad fields
        raise MoecError(f"the GGUF metadata describes no {arch} model: {error}", where=where) from None
    return _completed(config, gguf)


def _completed(config: Any, gguf: GgufFile) -> Any:
    """What transformers leaves out: sizes that llama.cpp keeps under other keys, and Mixtral as such."""
    arch = gguf.architecture
    if arch == "llama":
        from transformers import MixtralConfig

        kept = {k: v for k, v in config.to_dict().items() if k not in ("model_type", "architectures")}
        config = MixtralConfig(**kept)
        config.num_local_experts = int(gguf.field("llama.expert_count"))
        config.num_experts_per_tok = int(gguf.field("llama.expert_used_count"))
    sizes = {
        "moe_intermediate_size": f"{arch}.expert_feed_forward_length",
        "shared_expert_intermediate_size": f"{arch}.expert_shared_feed_forward_length",
        "head_dim": f"{arch}.attention.key_length",
    }
    for name, key in sizes.items():
        if (hasattr(config, name) or name == "head_dim") and gguf.field(key):
            setattr(config, name, int(gguf.field(key)))
    config.rms_norm_eps = _decimal(config.rms_norm_eps)
    config.rope_parameters["rope_theta"] = _decimal(config.rope_parameters["rope_theta"])
    config.dtype = "bfloat16"
    return config


def _decimal(value: float) -> float:
    """The number that a float32 field was written from: 1e-06, not 9.999999974752427e-07."""
    return float(str(np.float32(value)))


def _gpt_oss_config(gguf: GgufFile) -> Any:
    """Without transformers' reader: 5.24 takes the wrong part of the fields of rotary scaling, and fails."""
    from transformers import GptOssConfig

    def number(key: str, default: float = 0) -> Any:
        return gguf.field(f"gpt-oss.{key}", default)

    rope = {"rope_type": "default", "rope_theta": _decimal(number("rope.freq_base", 150000.0))}
    if gguf.field("gpt-oss.rope.scaling.type") == "yarn":
        original = int(number("rope.scaling.original_context_length", 4096))
        rope |= {"rope_type": "yarn", "factor": float(number("rope.scaling.factor", 32.0))}
        rope |= {"original_max_position_embeddings": original}
        rope |= {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": False}
    return GptOssConfig(
        vocab_size=gguf.tensor_shape("token_embd.weight")[0],
        hidden_size=int(number("embedding_length")),
        intermediate_size=int(number("expert_feed_forward_length") or number("feed_forward_length")),
        num_hidden_layers=int(number("block_count")),
        num_attention_heads=int(number("attention.head_count")),
        num_key_value_heads=int(number("attention.head_count_kv")),
        head_dim=int(number("attention.key_length", 64)),
        max_position_embeddings=int(number("context_length")),
        rms_norm_eps=_decimal(number("attention.layer_norm_rms_epsilon", 1e-5)),
        sliding_window=int(number("attention.sliding_window", 128)),
        num_local_experts=int(number("expert_count")),
        num_experts_per_tok=int(number("expert_used_count")),
        rope_parameters=rope,
        tie_word_embeddings="output.weight" not in gguf.names,
        eos_token_id=gguf.field("tokenizer.ggml.eos_token_id"),
        bos_token_id=gguf.field("tokenizer.ggml.bos_token_id"),
        pad_token_id=gguf.field("tokenizer.ggml.padding_token_id"),
        dtype="bfloat16",
    )


def _save_tokenizer(gguf: GgufFile, folder: Path) -> None:
    """tokenizer.json and its settings, where the file has a tokenizer."""
    from transformers import AutoTokenizer

    from moec.checkpoint.skeleton import quiet

    if gguf.field("tokenizer.ggml.model") is None:
        return
    try:
        with quiet(), _readable(gguf) as path:
            tokenizer = AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    except Exception as error:  # transformers raises many types here
        what = f"the tokenizer in the GGUF file cannot be converted: {str(error).splitlines()[0]}"
        raise MoecError(what, where=str(gguf.path)) from None
    tokenizer.save_pretrained(folder)


@contextlib.contextmanager
def _readable(gguf: GgufFile) -> Iterator[Path]:
    """A file whose tokenizer transformers 5.24 can read: GPT-OSS's needs to be without rotary scaling."""
    if gguf.architecture != "gpt-oss":
        yield gguf.path
        return
    with tempfile.TemporaryDirectory(prefix="moec-gguf-") as folder:
        path = Path(folder) / "tokenizer.gguf"
        gguf.write_metadata(path, without="gpt-oss.rope.scaling.")
        yield path


def _tensor_names(checkpoint: GgufCheckpoint) -> dict[str, tuple[str, ...]]:
    """Parameter -> the GGUF tensors that it is made of (gate, then up)."""
    from gguf import MODEL_ARCH_NAMES, get_tensor_name_map

    arch = next(key for key, name in MODEL_ARCH_NAMES.items() if name == checkpoint.gguf.architecture)
    table = get_tensor_name_map(arch, checkpoint.config.num_hidden_layers)
    return {name: _tensors_of(name, table) for name in checkpoint.param_names()}


def _tensors_of(name: str, table: Any) -> tuple[str, ...]:
    if match := _EXPERTS.fullmatch(name):
        parts = ("gate", "up") if match[2] == "gate_up" else ("down",)
        suffix = "bias" if match[3] else "weight"
        return tuple(f"blk.{match[1]}.ffn_{part}_exps.{suffix}" for part in parts)
    if match := _CORRECTION.fullmatch(name):
        return (f"blk.{match[1]}.exp_probs_b.bias",)
    if name.endswith(".self_attn.sinks"):
        return (f"blk.{name.split('.')[2]}.attn_sinks.weight",)
    stem, _, suffix = name.rpartition(".")
    found = table.get_name(stem)
    return (f"{found}.{suffix}",) if found else ()


def _unpermuted(weight: np.ndarray, heads: int) -> np.ndarray:
    """Rows of a rotary projection `[heads*D, K]`: interleaved pairs back to halves."""
    pairs = weight.reshape(heads, weight.shape[0] // heads // 2, 2, -1)
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def _gpt_oss(parts: list[np.ndarray], axis: int) -> np.ndarray:
    """gate and up rows alternate, and matrices are `[in, out]`."""
    joined = parts[0]
    if len(parts) == 2:
        joined = np.stack(parts, axis=axis + 1)
        joined = joined.reshape(*joined.shape[:axis], -1, *joined.shape[axis + 2 :])
    return joined.swapaxes(-1, -2) if joined.ndim == axis + 2 else joined
