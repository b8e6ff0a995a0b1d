"""A checkpoint made of arrays: what packers ask of `moec.checkpoint.Checkpoint`, without files."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass
class ArrayCheckpoint:
    """Parameters by name; reads are counted, to show that experts are read one by one."""

    arrays: dict[str, np.ndarray]
    reads: int = 0

    def shape(self, name: str) -> tuple[int, ...]:
        return self.arrays[name].shape

    def param(self, name: str) -> np.ndarray:
        self.reads += 1
        return self.arrays[name]

    def expert(self, name: str, expert: int) -> np.ndarray:
        self.reads += 1
        return self.arrays[name][expert]
