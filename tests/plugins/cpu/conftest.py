import numpy as np
import pytest


@pytest.fixture
def rng():
    """Fresh random numbers; the seed is printed, so that a failure can be repeated."""
    seed = np.random.SeedSequence().entropy % 2**32
    print("seed", seed)
    return np.random.default_rng(seed)
