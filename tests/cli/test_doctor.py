"""`moec doctor` on this machine and on one that lacks something."""

import shutil
from importlib.metadata import PackageNotFoundError, version

from click.testing import CliRunner

from moec.cli import doctor as doctor_module
from moec.cli.doctor import doctor


def lines_of(result):
    assert result.exit_code == 0, result.output
    return result.output.splitlines()


def test_names_versions_and_machine():
    lines = lines_of(CliRunner().invoke(doctor))
    text = "\n".join(lines)
    assert any(line.split()[:3] == ["ok", "torch", version("torch")] for line in lines if line.strip())
    for word in ("python", "cpu", "memory", "libmoec_cpu", "nvcc", "CUDA driver", "tensorrt-rtx"):
        assert word in text


def test_missing_package_says_how_to_get_it(monkeypatch):
    def no_onnx(name):
        if name == "onnx":
            raise PackageNotFoundError
        return "1.0"

    monkeypatch.setattr(doctor_module, "version", no_onnx)
    lines = lines_of(CliRunner().invoke(doctor))
    assert any("MISSING onnx " in line and "pip install onnx" in line for line in lines)
    assert "cannot build and run on this CPU yet: see onnx" in lines[-1]


def test_gpu_things_are_optional(monkeypatch, tmp_path):
    from moec.runtime import gpu_info

    monkeypatch.setattr(gpu_info, "driver_version", lambda: None)
    monkeypatch.setattr(gpu_info, "gpu_names", list)
    monkeypatch.setattr(gpu_info, "_NVCC_DEFAULT", tmp_path / "nvcc")
    monkeypatch.setattr(shutil, "which", lambda _name: None)
    monkeypatch.delenv("CUDACXX", raising=False)
    lines = lines_of(CliRunner().invoke(doctor))
    for name in ("nvcc", "CUDA driver", "GPU"):
        assert any(line.split()[:1] == ["-"] and f" {name} " in line for line in lines), name
