"""The few model families whose modeling code cannot be traced as it is. Anything else needs no entry here."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

from moec.frontend.families import deepseek_v2, llama4

_PATCHES = {"deepseek_v2": deepseek_v2.patched, "llama4_text": llama4.patched}


@contextlib.contextmanager
def patched(model: Any) -> Iterator[None]:
    """Patches the modeling code of the model's family while the context is open; does nothing for most."""
    patch = _PATCHES.get(model.config.model_type)
    with patch(model) if patch else contextlib.nullcontext():
        yield
