import numpy as np
import pytest

from tests.helpers.kernels import library


@pytest.fixture
def rng():
    seed = np.random.SeedSequence().entropy
    print("seed", seed)
    return np.random.default_rng(seed)


@pytest.fixture(scope="session")
def lib():
    return library()
