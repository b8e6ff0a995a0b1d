"""Sets that are iterated in order: the same graph from every process.

Modeling code makes rotary angles and masks `for layer_type in set(config.layer_types)`. The order of such a
loop follows Python's hash seed, and so would the order of nodes in the graph, and every byte of a bundle.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any


class SortedSet(set):
    """A set of strings whose iteration is sorted."""

    def __iter__(self) -> Iterator[Any]:
        return iter(sorted(super().__iter__(), key=str))


@contextlib.contextmanager
def sorted_sets(model: Any) -> Iterator[None]:
    """While it is open, `set(...)` in the modeling code is sorted; sets that modules keep stay sorted."""
    names = {type(module).__module__ for module in model.modules()}
    code = [sys.modules[name] for name in names if name.startswith("transformers.models.")]
    for module in model.modules():
        public = [name for name, value in vars(module).items() if type(value) is set and name[0] != "_"]
        for name in public:
            setattr(module, name, SortedSet(getattr(module, name)))
    for source in code:
        source.set = SortedSet
    try:
        yield
    finally:
        for source in code:
            del source.set
