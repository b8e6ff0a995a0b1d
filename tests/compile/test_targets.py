import pytest

from moec.compile import targets
from moec.compile.gpu import Gpu
from moec.compile.targets import RTX_TARGETS, parse_targets
from moec.errors import MoecError


@pytest.fixture
def modules(monkeypatch):
    """Which TensorRT modules seem to be installed."""
    installed = {"tensorrt_rtx"}
    monkeypatch.setattr(targets, "has_module", installed.__contains__)
    monkeypatch.setattr(targets, "local_gpus", list)
    return installed


def test_auto_is_every_target_of_tensorrt_rtx(modules):
    assert parse_targets("auto").engines == {"tensorrt_rtx": RTX_TARGETS}
    assert parse_targets("").engines == parse_targets("auto").engines


def test_auto_without_tensorrt_is_the_cpu_alone(modules):
    modules.clear()
    assert parse_targets("auto").cpu_only


def test_cpu_builds_no_engine(modules):
    assert parse_targets("cpu").cpu_only


def test_targets_are_sorted_and_unique(modules):
    assert parse_targets("sm_120, sm_80,cpu,SM_80").engines == {"tensorrt_rtx": ("sm_80", "sm_120")}


@pytest.mark.parametrize("text", ["sm_90", "sm_100", "sm_80,sm_90"])
def test_data_center_gpus_need_tensorrt_11(modules, text):
    with pytest.raises(MoecError) as error:
        parse_targets(text)
    assert "TensorRT-RTX cannot build" in str(error.value)
    assert "cannot load there" in str(error.value)
    assert "TensorRT 11" in str(error.value)


def test_tensorrt_11_builds_for_the_gpu_that_is_here(modules, monkeypatch):
    modules.add("tensorrt")
    monkeypatch.setattr(targets, "local_gpus", lambda: [Gpu("H100", "sm_90", 80 << 30)])
    assert parse_targets("sm_90,sm_80").engines == {"tensorrt_rtx": ("sm_80",), "tensorrt": ("sm_90",)}
    with pytest.raises(MoecError, match="sm_100"):
        parse_targets("sm_100")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpu", "unknown target 'gpu'"),
        ("sm_9x", "unknown"),
        ("sm_75", "older than sm_80"),
    ],
)
def test_bad_targets_are_named(modules, text, message):
    with pytest.raises(MoecError, match=message):
        parse_targets(text)


def test_an_explicit_target_needs_the_module(modules):
    modules.clear()
    with pytest.raises(MoecError, match="needs TensorRT-RTX, which is not installed"):
        parse_targets("sm_80")
