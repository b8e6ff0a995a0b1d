"""Fresh random numbers for tests, reproducible from what a failing test prints."""

from __future__ import annotations

import os

import numpy as np


def fresh_rng() -> np.random.Generator:
    """A generator with a new seed, which it prints; MOEC_TEST_SEED fixes it."""
    seed = int(os.environ.get("MOEC_TEST_SEED") or int.from_bytes(os.urandom(4), "little"))
    print(f"MOEC_TEST_SEED={seed}")
    return np.random.default_rng(seed)
