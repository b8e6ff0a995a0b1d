"""Patches of modeling code while it is traced: the few families that need one, and sets in all of them.

Anything that is not listed needs no entry here.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from moec.frontend.families import deepseek_v2, llama4
from moec.frontend.families.sorted_sets import sorted_sets

_PATCHES = {"deepseek_v2": deepseek_v2.patched, "llama4_text": llama4.patched}


@contextlib.contextmanager
def patched(model: Any) -> Iterator[None]:
    """Patches the modeling code of the model's family while the context is open."""
    patch = _PATCHES.get(model.config.model_type)
    with sorted_sets(model), patch(model) if patch else contextlib.nullcontext():
        yield
