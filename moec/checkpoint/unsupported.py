"""Models that moec knows it cannot express, told from config.json: a sentence with family and reason."""

from __future__ import annotations

from typing import Any

from moec.errors import MoecError

_BY_LAYER = {
    "indexed_attention": "its attention picks tokens with an indexer (DSA), which keeps a cache of its own",
    "heavily_compressed_attention": "its attention reads compressed tokens, which are a cache of their own",
    "compressed_sparse_attention": "its attention reads compressed tokens, which are a cache of their own",
    "hybrid": "its layers keep convolution states and attention caches at once",
    "hybrid_sliding": "its layers keep convolution states and attention caches at once",
}
_BY_FAMILY = {
    "minimax": "its lightning attention keeps a cache class of its own",
    "longcat_flash": "its experts run in a loop that depends on the data (experts that compute nothing)",
    "jetmoe": "its attention is made of experts",
    "dbrx": "its experts are stacked in one matrix",
    "zaya": "its layers keep convolution states and attention caches at once",
    "qwen4_exp_text": "its experimental layers are not in transformers' common form",
}


def refuse_unsupported(config: Any) -> None:
    """Raises MoecError for a configuration that cannot be compiled.

    Args:
        config: The transformers configuration.
    """
    kinds = getattr(config, "layer_types", None) or ()
    reason = _BY_FAMILY.get(config.model_type)
    reason = reason or next((_BY_LAYER[k] for k in kinds if k in _BY_LAYER), None)
    if reason is None and getattr(config, "num_kv_shared_layers", 0):
        reason = "its layers share the keys and values of other layers"
    if reason is not None:
        hint = "docs/families.md lists what is supported."
        raise MoecError(f"{config.model_type} models are not supported: {reason}", hint=hint)
