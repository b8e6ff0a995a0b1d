from moec.compile.gpu import Gpu
from moec.compile.requirements import misfits

ADA = Gpu("RTX 4090", "sm_89", 24 << 30)
HOPPER = Gpu("H100", "sm_90", 80 << 30)


def test_a_gpu_of_a_built_target_with_enough_memory_fits():
    assert misfits(["sm_80", "sm_89"], 1 << 30, [ADA]) == []


def test_another_architecture_is_named():
    (reason,) = misfits(["sm_80", "sm_89"], 1 << 30, [HOPPER])
    assert "H100 (sm_90)" in reason
    assert "sm_80, sm_89" in reason


def test_too_little_memory_is_said():
    assert misfits(["sm_89"], 30 << 30, [ADA]) == ["32.2 GB of device memory: RTX 4090 has 25.8 GB"]


def test_one_fitting_gpu_is_enough():
    assert misfits(["sm_89"], 1 << 30, [HOPPER, ADA]) == []


def test_no_gpu_at_all():
    assert misfits(["sm_89"], 1 << 30, []) == ["a GPU that the NVIDIA driver lists"]
