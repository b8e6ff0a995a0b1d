"""What a bundle keeps of a checkpoint besides its weights: tokenizer, config, generation defaults."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import xxhash

from moec.bundle.manifest import ModelIdentity, TokenizerFacts
from moec.bundle.writer import write_bytes, writing
from moec.checkpoint import Checkpoint
from moec.errors import MoecError

_DEFAULTS = (
    "do_sample",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "repetition_penalty",
    "max_new_tokens",
)


def identity(checkpoint: Checkpoint) -> ModelIdentity:
    """Name and fingerprint of the checkpoint."""
    text = checkpoint.text_files["config.json"]
    name = checkpoint.path.resolve().name
    return ModelIdentity(name, checkpoint.config.model_type, xxhash.xxh64_hexdigest(text.encode()))


def copy_model_files(checkpoint: Checkpoint, folder: Path) -> TokenizerFacts:
    """Copy config, generation config and tokenizer into the bundle.

    Raises:
        MoecError: a full disk.
    """
    for name, text in checkpoint.text_files.items():
        write_bytes(folder / name, text.encode())
    for path in checkpoint.tokenizer_files():
        with writing(folder / path.name, path.stat().st_size):
            shutil.copyfile(path, folder / path.name)
    if not (folder / "tokenizer.json").is_file():
        _convert_tokenizer(checkpoint, folder)
    return tokenizer_facts(checkpoint, folder)


def _convert_tokenizer(checkpoint: Checkpoint, folder: Path) -> None:
    """Make tokenizer.json of an older tokenizer (sentencepiece, vocab and merges), where transformers can."""
    if not checkpoint.tokenizer_files():
        return
    from transformers import AutoTokenizer

    try:
        AutoTokenizer.from_pretrained(checkpoint.path, local_files_only=True).save_pretrained(folder)
    except Exception as error:  # transformers raises many types here
        what = f"The checkpoint's tokenizer cannot be converted: {str(error).splitlines()[0]}"
        raise MoecError(what, where=str(checkpoint.path), hint="Save it as tokenizer.json first.") from None


def tokenizer_facts(checkpoint: Checkpoint, folder: Path) -> TokenizerFacts:
    """EOS and BOS ids (the generation config wins over the config) and what the folder has."""
    generation, config = generation_config(checkpoint), checkpoint.config.get_text_config()
    eos, bos = (_first(generation.get(n), getattr(config, n, None)) for n in ("eos_token_id", "bos_token_id"))
    return TokenizerFacts(
        eos_token_ids=tuple(eos if isinstance(eos, list) else [] if eos is None else [eos]),
        bos_token_id=bos,
        has_tokenizer=(folder / "tokenizer.json").is_file(),
        has_chat_template=_has_chat_template(folder),
    )


def generation_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """The checkpoint's generation_config.json, {} without one.

    Raises:
        MoecError: it is not JSON.
    """
    try:
        tree = json.loads(checkpoint.text_files.get("generation_config.json", "{}"))
    except ValueError:
        tree = None
    if not isinstance(tree, dict):
        raise MoecError("generation_config.json is not a JSON object", where=str(checkpoint.path))
    return tree


def generation_defaults(checkpoint: Checkpoint) -> dict[str, Any]:
    """Its sampling settings."""
    tree = generation_config(checkpoint)
    return {name: tree[name] for name in _DEFAULTS if tree.get(name) is not None}


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _has_chat_template(folder: Path) -> bool:
    if any((folder / name).is_file() for name in ("chat_template.jinja", "chat_template.json")):
        return True
    path = folder / "tokenizer_config.json"
    return path.is_file() and '"chat_template"' in path.read_text(encoding="utf-8")
