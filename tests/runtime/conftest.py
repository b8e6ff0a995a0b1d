"""Fresh random input for every run; the seed is printed with a failure."""

import secrets

import numpy as np
import pytest


@pytest.fixture
def seed():
    value = secrets.randbits(32)
    print(f"seed {value}")
    return value


@pytest.fixture
def rng(seed):
    return np.random.default_rng(seed)
