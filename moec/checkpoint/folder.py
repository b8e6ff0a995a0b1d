"""A Hugging Face checkpoint folder: config, weights by transformers parameter name, tokenizer files."""

from __future__ import annotations

import functools
import json
import os
import re
from pathlib import Path
from typing import Any

import numpy as np

from moec.checkpoint.quantized import METHODS, StoredTensors
from moec.checkpoint.safetensors_file import SafetensorsFile
from moec.checkpoint.unsupported import refuse_unsupported
from moec.errors import MoecError

_TOKENIZER = (
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)
_MAPPED_BYTES = 128 << 20
_TEXT = ("config.json", "generation_config.json")
_MODEL_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # as on the Hugging Face Hub


class Checkpoint:
    """An opened checkpoint; use `open_checkpoint`. Weights are read only when they are asked for.

    Attributes:
        path: The folder.
        config: The transformers configuration.
        files: The mapped safetensors files.
    """

    def __init__(self, path: Path, config: Any, files: list[SafetensorsFile]) -> None:
        from moec.checkpoint.names import resolve
        from moec.checkpoint.skeleton import meta_model

        self.path, self.config, self.files = path, config, files
        self._mapped = 0  # bytes that were read since the mapped pages were given back
        self._quantization = config.__dict__.pop("quantization_config", None)
        where = {name: f for f in files for name in f.tensors}
        self._tensors = StoredTensors(where, self._quantization)
        self._meta = meta_model(config)
        self._shapes = {n: tuple(t.shape) for n, t in self._meta.state_dict().items()}
        self._sources = resolve(self._meta, self._tensors.names())
        self._tied = {k: v for k, v in self._meta.all_tied_weights_keys.items() if k not in self._sources}

    def param_names(self) -> list[str]:
        """Names of all parameters and persistent buffers, as transformers calls them (tied ones included)."""
        return list(self._shapes)

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of a parameter, from the configuration."""
        return self._shapes[name]

    def canonical(self, name: str) -> str:
        """The parameter that holds the data of `name`: itself, or what it is tied to."""
        return self._tied.get(name, name)

    def param(self, name: str) -> np.ndarray:
        """The whole parameter in its own dtype (bf16 as ml_dtypes.bfloat16); mapped if not converted."""
        return self._read(name, None)

    def expert(self, name: str, expert: int) -> np.ndarray:
        """Slice `[expert]` of a stacked parameter `[E, ...]`; only that expert's tensors are read."""
        return self._read(name, expert)

    def _read(self, name: str, expert: int | None) -> np.ndarray:
        from moec.checkpoint.arrays import to_numpy, to_torch
        from moec.checkpoint.names import materialize

        self._release()
        source = self._sources.get(self.canonical(name))
        if source is None:
            raise MoecError(f"the checkpoint has no tensor for {name}", where=str(self.path))
        tensor = materialize(
            self.canonical(name), source, lambda *n: to_torch(self._tensors.read(*n)), self._meta, expert
        )
        want = self._shapes[name] if expert is None else self._shapes[name][1:]
        if tuple(tensor.shape) != want:
            raise MoecError(
                f"{name} has shape {tuple(tensor.shape)} in the checkpoint, {want} by its config",
                where=str(self.path),
            )
        array = to_numpy(tensor)
        array.flags.writeable = False  # it may be the mapped file
        self._mapped += array.nbytes
        return array

    def _release(self) -> None:
        """Mapped pages count as this process's memory: give them back now and then."""
        if self._mapped > _MAPPED_BYTES:
            for file in self.files:
                file.release()
            self._mapped = 0

    def tokenizer_files(self) -> list[Path]:
        """The tokenizer's files that exist (vocabulary, config, chat template)."""
        return [self.path / n for n in _TOKENIZER if (self.path / n).is_file()]

    @functools.cached_property
    def text_files(self) -> dict[str, str]:
        """Small text files by name: config.json and, where it exists, generation_config.json."""
        return {n: (self.path / n).read_text(encoding="utf-8") for n in _TEXT if (self.path / n).is_file()}

    def skeleton(self, dtype: Any = None, **kwargs: Any) -> Any:
        """The transformers model with zero-storage parameters (fp32 unless `dtype`); see `skeleton.py`."""
        import torch

        from moec.checkpoint.skeleton import zero_storage_model

        return zero_storage_model(self.config, dtype or torch.float32, **kwargs)

    def load_torch(self, dtype: Any = None, **kwargs: Any) -> Any:
        """The real model with its weights (fp32 unless `dtype`) and eager attention."""
        import torch
        from transformers import AutoModelForCausalLM

        from moec.checkpoint.skeleton import quiet

        options = {"attn_implementation": "eager", **kwargs}
        if self._quantization:
            return self._dequantized(dtype or torch.float32, options)
        with quiet():
            model = AutoModelForCausalLM.from_pretrained(self.path, dtype=dtype or torch.float32, **options)
        return model.eval()

    def _dequantized(self, dtype: Any, options: dict[str, Any]) -> Any:
        """transformers runs a quantized checkpoint on the hardware it was made for only."""
        import torch
        from transformers import AutoModelForCausalLM

        from moec.checkpoint.arrays import to_torch
        from moec.checkpoint.skeleton import quiet

        with quiet():
            model = AutoModelForCausalLM.from_config(self.config, dtype=dtype, **options)
        with torch.no_grad():
            for name, tensor in model.state_dict().items():
                tensor.copy_(to_torch(self.param(name)))
        return model.eval()

    def check(self, weights: bool = True) -> None:
        """Raises MoecError when the model is dense or when parameters are missing from the files.

        Args:
            weights: False when only the architecture counts.
        """
        from moec.checkpoint.skeleton import expert_parameters

        if not expert_parameters(self._meta):
            raise MoecError(
                f"{self.config.model_type} here is not a Mixture-of-Experts model: it has no expert weights",
                where=str(self.path),
                hint="moec compiles MoE checkpoints only (Mixtral, Qwen-MoE, OLMoE, DeepSeek, GPT-OSS, ...).",
            )
        missing = [n for n in self._shapes if self.canonical(n) not in self._sources] if weights else []
        if missing:
            more = f" and {len(missing) - 1} more" if len(missing) > 1 else ""
            raise MoecError(
                f"the checkpoint lacks {missing[0]}{more}",
                where=str(self.path),
                hint="Is a shard of it missing?",
            )


def open_checkpoint(path: str | os.PathLike[str], weights: bool = True) -> Checkpoint:
    """Opens a checkpoint folder and checks its config, model type, weight files and names.

    Args:
        path: The folder.
        weights: False opens the architecture alone: only config.json must be there, weight files are not
            looked at, and how they are stored does not count.

    Raises:
        MoecError: One clear sentence on what is wrong and where.
    """
    folder = Path(path)
    if folder.suffix == ".gguf" and folder.is_file():
        from moec.checkpoint.gguf import open_gguf

        return open_gguf(folder, weights)
    if not folder.is_dir():
        what = (
            "this is a file, not a checkpoint folder"
            if folder.exists()
            else "the checkpoint folder does not exist"
        )
        hint = "Give the folder with config.json and *.safetensors, or a .gguf file."
        if _MODEL_ID.fullmatch(str(path)) and not folder.exists():
            hint += f"\n  moec downloads no models: hf download {path} --local-dir FOLDER"
        raise MoecError(what, where=str(path), hint=hint)
    folder = _snapshot(folder)
    config = _config(folder, weights)
    refuse_unsupported(config)
    checkpoint = Checkpoint(folder, config, _files(folder) if weights else [])
    checkpoint.check(weights)
    return checkpoint


def _snapshot(folder: Path) -> Path:
    """A model's folder in the Hugging Face cache stands for its snapshot (refs/main, or the only one)."""
    snapshots = folder / "snapshots"
    if (folder / "config.json").exists() or not snapshots.is_dir():
        return folder
    main = folder / "refs" / "main"
    names = [main.read_text().strip()] if main.is_file() else sorted(p.name for p in snapshots.iterdir())
    if len(names) != 1 or not (snapshots / names[0]).is_dir():
        raise MoecError(
            "which snapshot is meant?", where=str(folder), hint="Give a folder below snapshots/ of it."
        )
    return snapshots / names[0]


def _config(folder: Path, weights: bool) -> Any:
    from transformers import AutoConfig
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    raw = _json(folder / "config.json", "config.json")
    kind = raw.get("model_type") if isinstance(raw, dict) else None
    if not isinstance(kind, str):
        raise MoecError("config.json names no model_type", where=str(folder / "config.json"))
    if kind not in CONFIG_MAPPING or kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        raise MoecError(
            f"model_type {kind!r} is not a causal language model that transformers knows",
            where=str(folder / "config.json"),
        )
    if weights and raw.get("quantization_config"):
        method = raw["quantization_config"].get("quant_method", "unknown")
        if method not in METHODS:
            raise MoecError(
                f"the checkpoint is already quantized ({method})",
                where=str(folder / "config.json"),
                hint="Give the bf16, fp16 or fp32 checkpoint (or fp8, mxfp4): moec quantizes itself.",
            )
    try:
        return _text_config(AutoConfig.from_pretrained(folder))
    except Exception as e:  # transformers raises many types for bad fields
        raise MoecError(f"config.json does not describe a {kind} model: {e}", where=str(folder)) from e


def _text_config(config: Any) -> Any:
    """The language model's part of a multimodal configuration."""
    text = config.get_text_config(decoder=True)
    if text is not config and getattr(config, "quantization_config", None):
        text.quantization_config = config.quantization_config
    return text


def _json(path: Path, name: str) -> Any:
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as e:
        raise MoecError(f"the folder has no {name}", where=str(path.parent)) from e
    except (OSError, ValueError) as e:
        raise MoecError(f"{name} is not readable JSON: {e}", where=str(path)) from e


def _files(folder: Path) -> list[SafetensorsFile]:
    index = folder / "model.safetensors.index.json"
    if index.is_file():
        table = _json(index, index.name)
        if not isinstance(table, dict) or not isinstance(table.get("weight_map"), dict):
            raise MoecError("the index of the shards has no weight_map", where=str(index))
        names = sorted(set(table["weight_map"].values()))
    else:
        names = sorted(p.name for p in folder.glob("*.safetensors"))
    if not names:
        raise MoecError(
            "the folder has no *.safetensors",
            where=str(folder),
            hint="Save it with save_pretrained(...) first.",
        )
    return [_file(folder, n) for n in names]


def _file(folder: Path, name: str) -> SafetensorsFile:
    if Path(name).name != name:
        raise MoecError(f"the index names a shard outside the folder: {name}", where=str(folder))
    return SafetensorsFile(folder / name)
