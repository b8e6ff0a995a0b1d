"""Random texts on which no router is near a tie.

Sums in another order move a router's logits by a millionth, rounding a cache by ten thousandths. Where two
experts are closer than that, a correct implementation may take the other one, and its logits are far off.
Such a text says nothing, so another one is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import onnx_ir as ir
import torch

from moec.bundle.geometry import Geometry
from tests.helpers.captured import captured, checkpoint, rewritten
from tests.helpers.graphs import reference_logits
from tests.helpers.margins import recorded
from tests.helpers.rng import fresh_rng

SUMS = 1e-4
"""A margin that the order of sums in float32 keeps far away from."""

LENGTHS = (19, 12)
Run = Callable[[torch.nn.Module, np.ndarray], np.ndarray]


def decided_texts(
    family: str, lengths: Sequence[int] = LENGTHS, margin: float = SUMS, run: Run = reference_logits
) -> list[np.ndarray]:
    """Random texts for the tiny model of a family; int32.

    Args:
        family: Whose checkpoint and captured graph.
        lengths: Of each text.
        margin: How far any logit of any router may move without a change of experts.
        run: The pass of transformers that routers are watched in.
    """
    model, geometry = checkpoint(family).load_torch(), captured(family).geometry
    return draw(fresh_rng(), model, geometry, rewritten(family), lengths, margin, run)


def draw(
    rng: np.random.Generator, model: torch.nn.Module, geometry: Geometry, graph: Iterable[ir.Node],
    lengths: Sequence[int], margin: float = SUMS, run: Run = reference_logits,
) -> list[np.ndarray]:  # fmt: skip
    """`decided_texts` of any model; `graph` as in `recorded`, empty where the best k of a softmax go on."""
    texts = []
    for length in lengths:
        for _ in range(200):
            text = rng.integers(0, geometry.vocab_size, length).astype(np.int32)
            with recorded(model, geometry, graph, margin) as layers:
                run(model, text)
            if not any(np.concatenate(layer).any() for layer in layers):
                break
        else:
            raise AssertionError(f"no text of {length} tokens without a router within {margin} of a tie")
        texts.append(text)
    return texts
