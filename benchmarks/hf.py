"""transformers on the CPU as the yardstick: the checkpoint's bf16 weights in float32."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils.logging import disable_progress_bar


def load_reference(checkpoint: Path, threads: int) -> torch.nn.Module:
    """The model in float32, experts computed one by one ("eager")."""
    torch.set_num_threads(threads)
    disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, experts_implementation="eager"
    )
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def score(model: torch.nn.Module, tokens: list[int]) -> np.ndarray:
    """Logits of every position in one pass, float32 [S,V]."""
    return model(torch.tensor([tokens])).logits[0].numpy()


class Decoder:
    """Greedy decoding one token a call, after a prompt.

    Args:
        experts: transformers' name of the experts function: eager | batched_mm.
    """

    def __init__(self, model: torch.nn.Module, prompt: list[int], experts: str) -> None:
        self.model, self.experts = model, experts
        model.set_experts_implementation("eager")  # batched_mm needs minutes for a prompt of 1024
        self.cache = DynamicCache(config=model.config)
        with torch.inference_mode():
            out = model(torch.tensor([prompt]), cache=self.cache, logits_to_keep=1)
        self.next = out.logits.argmax(-1)

    @torch.inference_mode()
    def step(self) -> None:
        """Compute one more token."""
        out = self.model(self.next, cache=self.cache)
        self.next = out.logits.argmax(-1)

    def use(self) -> None:
        """Switch the model to this decoder's experts function (call before a round of steps)."""
        self.model.set_experts_implementation(self.experts)
