"""moec::Experts on the CPU against the NumPy reference."""

import numpy as np
import pytest

from moec.reference.moe import experts
from tests.helpers.cpu_attention import close
from tests.helpers.cpu_moe import MoeCase
from tests.helpers.cpu_op import CpuOp


@pytest.mark.parametrize(("weight_format", "tolerance"), [("int4", 1e-5), ("bf16", 1e-5)])
def test_given_ids_and_weights(rng, weight_format, tolerance):
    case = MoeCase(rng, weight_format=weight_format)
    op = CpuOp("Experts", **case.attributes)
    inputs = case.experts(case.tokens(12), [4, 0, 3])
    close(op(in_place=True, **inputs)[0], experts(**inputs, **op.attributes)[0], tolerance)


def test_repeated_ids_count_twice(rng):
    case = MoeCase(rng)
    op = CpuOp("Experts", **case.attributes)
    inputs = case.experts(case.tokens(2), [2])
    inputs["ids"][:] = 1
    close(op(**inputs)[0], experts(**inputs, **op.attributes)[0], 1e-5)


@pytest.mark.parametrize("bad", [-1, 6])
def test_id_out_of_range(rng, bad):
    case = MoeCase(rng)
    inputs = case.experts(case.tokens(2), [2])
    inputs["ids"][1, 2] = bad
    with pytest.raises(Exception, match=f"layer 5: expert id {bad} is out of range"):
        CpuOp("Experts", **case.attributes)(**inputs)


def test_ids_of_padding_are_not_read(rng):
    case = MoeCase(rng)
    inputs = case.experts(case.tokens(2), [1])
    inputs["ids"][1] = 99
    assert np.isfinite(CpuOp("Experts", **case.attributes)(**inputs)[0]).all()
