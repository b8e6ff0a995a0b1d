"""DeepSeek-V2: rotary embeddings are complex products."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

from moec.frontend.families import real_rope


def patched(model: Any) -> AbstractContextManager[None]:
    """Real rotary embeddings; q and k are `[b,H,S,D]`."""
    return real_rope.patched(model, heads_axis=1)
