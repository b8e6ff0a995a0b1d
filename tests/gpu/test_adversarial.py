"""Inputs that no working model gives, on a real GPU: the emulator's own tests with the GPU's library."""

from tests.plugins.kernels.test_adversarial import *  # noqa: F403 (tests, collected here)
