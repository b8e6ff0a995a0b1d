"""Tests that run on a GPU: all marked `gpu`, and skipped with the reason where they cannot run."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest

from moec.compile.gpu import Gpu, local_gpus
from tests.helpers.gpu import why_no_gpu
from tests.helpers.rng import fresh_rng

HERE = Path(__file__).parent
# The harness captures kernels that no plain launch may have loaded yet; loading is not allowed in a capture.
os.environ.setdefault("CUDA_MODULE_LOADING", "EAGER")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Marks the tests of this folder (the hook sees those of the whole run)."""
    ours = [item for item in items if HERE in item.path.parents]
    reason = why_no_gpu() if ours else None
    for item in ours:
        item.add_marker(pytest.mark.gpu)
        if reason:
            item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def gpu() -> Gpu:
    """The GPU that tests run on: the first one."""
    return local_gpus()[0]


@pytest.fixture
def rng() -> np.random.Generator:
    return fresh_rng()


@pytest.fixture
def lib(gpu: Gpu):
    """The kernels on the GPU, launched without a graph; has the interface of the emulator's library."""
    from tests.helpers.gpu_kernels import gpu_library

    library = gpu_library(gpu.arch)
    library.set_replays(0)
    yield library
    library.set_replays(0)
