"""What a request cost: tokens, seconds, latencies, cache bytes."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np


@dataclass
class Statistics:
    """Numbers of one request; seconds are wall time inside the engine, not the consumer's.

    Attributes:
        prompt_tokens: Tokens of the prompt, of which `cached_tokens` were already in the slot.
        prefill_seconds: Time in the prompt's chunks.
        decode_seconds: Of each token after the first, the time of the round that made it.
        cache_bytes, cache_fp16_bytes: KV cache of all slots as allocated, and what fp16 would take.
    """

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    prefill_seconds: float = 0.0
    decode_seconds: list[float] = field(default_factory=list)
    cache_bytes: int = 0
    cache_fp16_bytes: int = 0

    @property
    def tokens_per_second(self) -> float:
        """Decode speed; 0 before the second token."""
        total = sum(self.decode_seconds)
        return len(self.decode_seconds) / total if total > 0 else 0.0

    def milliseconds(self, percentile: float) -> float:
        """Milliseconds a token at a percentile, 0 before the second token."""
        return float(np.percentile(self.decode_seconds, percentile)) * 1e3 if self.decode_seconds else 0.0

    def __str__(self) -> str:
        cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
        ratio = self.cache_fp16_bytes / self.cache_bytes if self.cache_bytes else 0.0
        return (
            f"prompt {self.prompt_tokens} tokens{cached} in {self.prefill_seconds:.2f} s | "
            f"generated {self.generated_tokens} tokens, {self.tokens_per_second:.1f} tokens/s, "
            f"{self.milliseconds(50):.1f} ms/token p50, {self.milliseconds(95):.1f} p95 | "
            f"KV cache {self.cache_bytes / 1e6:.1f} MB, fp16 would take {self.cache_fp16_bytes / 1e6:.1f} MB "
            f"({ratio:.1f}x)"
        )
