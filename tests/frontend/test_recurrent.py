"""Exported recurrent layers in stock ONNX Runtime: what padding, idle rows and emptied slots do to states."""

from __future__ import annotations

import numpy as np
import pytest

from moec.frontend import save_exported
from tests.helpers.captured import captured, checkpoint
from tests.helpers.decided import decided_texts
from tests.helpers.graphs import Stepper, reference_logits, session

FAMILIES = [
    "lfm2_moe",
    pytest.param("qwen3_next", marks=pytest.mark.slow),
    pytest.param("jamba", marks=pytest.mark.slow),
]


@pytest.fixture(scope="module")
def stepper(tmp_path_factory):
    """family -> a Stepper of its exported graph with empty slots."""
    made = {}

    def get(family: str) -> Stepper:
        if family not in made:
            path = tmp_path_factory.mktemp(family) / "exported.onnx"
            save_exported(captured(family), checkpoint(family), path)
            made[family] = session(path)
        return Stepper(made[family])

    return get


def _states(stepper: Stepper, slot: int) -> list[np.ndarray]:
    return [array[slot].copy() for name, array in stepper.state.items() if name.startswith("state.")]


def _text(family: str) -> np.ndarray:
    return decided_texts(family, lengths=(19,))[0]


@pytest.mark.parametrize("family", FAMILIES)
def test_padding_and_idle_rows_leave_states_alone(family, stepper):
    text, plain, padded = _text(family), stepper(family), stepper(family)
    want = plain.step([(0, text)])
    padded.step([(1, text[:5])])
    before = _states(padded, 1)
    got = padded.step([(0, text), (1, text[:0])], width=len(text) + 6)
    np.testing.assert_allclose(got[0], want[0], atol=1e-5)
    for a, b in zip(_states(padded, 1), before, strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(_states(padded, 0), _states(plain, 0), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_short_chunks_equal_one_long_one(family, stepper):
    """Chunks shorter than the convolution, too."""
    text, whole, pieces = _text(family), stepper(family), stepper(family)
    want = whole.step([(0, text)])
    for part in np.split(text, [1, 2, 4, 11]):
        got = pieces.step([(0, part)])
    np.testing.assert_allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("family", FAMILIES)
def test_an_emptied_slot_starts_at_zero(family, stepper):
    text, used = _text(family), stepper(family)
    used.step([(0, text[::-1].copy())])
    used.lengths[0] = 0
    got = used.step([(0, text)])
    np.testing.assert_allclose(got, reference_logits(checkpoint(family).load_torch(), text, 1), atol=2e-5)
