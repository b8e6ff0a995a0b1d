"""moec: an ahead-of-time compiler for Mixture-of-Experts language models.

`moec.build(model, bundle)` compiles a Hugging Face checkpoint into a bundle, `moec.load(bundle)` runs it.
"""

from __future__ import annotations

from typing import Any

from moec.errors import MoecError
from moec.version import __version__

__all__ = ["AsymmetricKVCacheQuantizer", "MoecError", "__version__", "build", "load"]

# torch and ONNX Runtime take seconds to import: only what is asked for is loaded.
_LAZY = {
    "AsymmetricKVCacheQuantizer": "moec.quantizer",
    "build": "moec.builder",
    "load": "moec.runtime",
}


def __getattr__(name: str) -> Any:
    if name not in _LAZY:
        raise AttributeError(f"module 'moec' has no attribute {name!r}")
    from importlib import import_module

    return getattr(import_module(_LAZY[name]), name)
