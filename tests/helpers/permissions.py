"""Processes that obey file permissions, also where the tests run as root."""

from __future__ import annotations

import ctypes

_DROP_FROM_BOUNDING_SET = 24  # prctl
_DAC_OVERRIDE, _DAC_READ_SEARCH = 1, 2  # what lets root read and write everything


def obey_permissions() -> None:
    """For `subprocess`'s `preexec_fn`: root loses both at the exec; others have neither."""
    libc = ctypes.CDLL(None)
    for capability in (_DAC_OVERRIDE, _DAC_READ_SEARCH):
        libc.prctl(_DROP_FROM_BOUNDING_SET, capability, 0, 0, 0)
