"""What is missing for TensorRT, and the error that says so."""

import os
import stat

from moec.compile.gpu import Gpu
from moec.runtime import gpu_info


def test_a_machine_without_anything(monkeypatch):
    monkeypatch.setattr(gpu_info, "driver_version", lambda: None)
    monkeypatch.setattr(gpu_info, "has_module", lambda _name: False)
    error = str(gpu_info.no_tensorrt([]))
    for word in (
        "NVIDIA driver",
        "pip install tensorrt-rtx",
        "moec[gpu]",
        "an engine in the bundle",
        "--device cpu",
    ):
        assert word in error


def test_driver_without_gpu(monkeypatch):
    monkeypatch.setattr(gpu_info, "driver_version", lambda: "13.0")
    monkeypatch.setattr(gpu_info, "gpu_names", list)
    monkeypatch.setattr(gpu_info, "has_module", lambda _name: True)
    assert gpu_info.missing_for_tensorrt() == ["a GPU: the driver is there, but nvidia-smi lists none"]


def test_an_engine_for_other_gpus(monkeypatch):
    monkeypatch.setattr(gpu_info, "driver_version", lambda: "13.0")
    monkeypatch.setattr(gpu_info, "gpu_names", lambda: ["NVIDIA H200, 9.0, 143771 MiB"])
    h200 = Gpu("NVIDIA H200", "sm_90", 143771 << 20)
    monkeypatch.setattr("moec.compile.requirements.local_gpus", lambda: [h200])
    engine = {"targets": ["sm_80", "sm_89"], "memory": {"total": 1 << 30}}
    error = str(gpu_info.no_tensorrt([engine]))
    assert "an engine for NVIDIA H200 (sm_90): the plan is for sm_80, sm_89" in error
    fitting = {"targets": ["sm_90"], "memory": {"total": 1 << 30}}
    assert "sm_90" not in str(gpu_info.no_tensorrt([engine, fitting]))


def test_gpu_names_are_read_from_nvidia_smi(monkeypatch, tmp_path):
    tool = tmp_path / "nvidia-smi"
    tool.write_text("#!/bin/sh\necho 'NVIDIA H200, 9.0, 143771 MiB'\n")
    tool.chmod(tool.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert gpu_info.gpu_names() == ["NVIDIA H200, 9.0, 143771 MiB"]
    tool.write_text("#!/bin/sh\nexit 9\n")
    assert gpu_info.gpu_names() == []


def test_nvcc_of_the_environment(monkeypatch):
    monkeypatch.setenv("CUDACXX", "/opt/cuda/bin/nvcc")
    assert str(gpu_info.find_nvcc()) == "/opt/cuda/bin/nvcc"


def test_has_module():
    assert gpu_info.has_module("json.decoder")
    assert not gpu_info.has_module("no_such_package.part")
