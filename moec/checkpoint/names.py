"""Which checkpoint tensors make up which parameter, by transformers' own conversion tables.

Checkpoints keep one tensor per expert and projection, transformers fuses them into `[E, ...]` parameters
while loading. The same tables are applied here lazily, so one expert can be read without building the fused
tensor.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    dot_natural_key,
    rename_source_key,
)

Read = Callable[[str, int | None], torch.Tensor]


@dataclass
class Source:
    """How a parameter is made: converter (None: taken as it is) and input tensors by source pattern.

    A converter may make several parameters at once; `name` is the first of them.
    """

    name: str
    converter: WeightConverter | None = None
    tensors: dict[str | None, list[str]] = field(default_factory=dict)

    def names(self) -> list[str]:
        """All checkpoint tensors it is made of."""
        return [n for group in self.tensors.values() for n in group]

    def is_listed_per_expert(self) -> bool:
        """Whether the checkpoint has one tensor per expert (so an expert is a subset of the names)."""
        ops = self.converter.operations if self.converter else ()
        return any(type(op).__name__ == "MergeModulelist" and op.dim == 0 for op in ops)


def resolve(model: Any, keys: Iterable[str]) -> dict[str, Source]:
    """Parameter or buffer name of `model` (meta device) -> its Source, for all tensors `keys`."""
    table = get_model_conversion_mapping(model)
    renamings = [t for t in table if isinstance(t, WeightRenaming)]
    converters = [t for t in table if isinstance(t, WeightConverter)]
    by_pattern = {p: c for c in converters for p in c.source_patterns}
    state, out = model.state_dict(), {}
    for key in sorted(keys, key=dot_natural_key):
        name, pattern = rename_source_key(key, renamings, converters, model.base_model_prefix, state)
        source = out.setdefault(name, Source(name))
        source.converter = by_pattern.get(pattern)
        source.tensors.setdefault(pattern, []).append(key)
    for name, source in list(out.items()):
        for other in _other_targets(name, source.converter):
            out[other] = source
    return out


def _other_targets(name: str, converter: WeightConverter | None) -> list[str]:
    if converter is None or len(converter.target_patterns) < 2:
        return []
    first, *rest = converter.target_patterns
    return [name.replace(first, other) for other in rest]


def materialize(name: str, source: Source, read: Read, model: Any, expert: int | None = None) -> torch.Tensor:
    """The parameter `name`, or the slice `[expert]` of it, reading only the tensors it needs.

    Args:
        name: Parameter name in transformers.
        source: From `resolve`.
        read: Gives a checkpoint tensor by name, or one slice of its first axis.
        model: The model on the meta device (some conversions ask its config).
        expert: Index into the first axis; None for the whole parameter.
    """
    if source.converter is None:
        return read(source.names()[0], expert)
    groups = {p: _pick(source, names, read, expert) for p, names in source.tensors.items()}
    converter = copy.deepcopy(source.converter)
    converter.collected_tensors = groups
    made = converter.convert(source.name, model=model, config=model.config)
    value = made[name] if name in made else next(iter(made.values()))
    value = value[0] if isinstance(value, list) else value
    return value if expert is None else value[0]


def _pick(source: Source, names: list[str], read: Read, expert: int | None) -> list[torch.Tensor]:
    if expert is None:
        return [read(n, None) for n in names]
    if source.is_listed_per_expert():
        return [read(names[expert], None)]
    return [read(n, expert)[None] for n in names]
