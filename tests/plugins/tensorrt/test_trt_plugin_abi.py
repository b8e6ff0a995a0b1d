"""Our ABI header against NVIDIA's, wherever those headers are installed."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
SOURCE = Path(__file__).with_name("abi_check.cpp")
FOLDERS = (
    "/usr/include",
    "/usr/include/x86_64-linux-gnu",
    "/usr/local/tensorrt/include",
    "/opt/tensorrt/include",
)


def tensorrt_headers() -> Path | None:
    folders = [os.environ["MOEC_TENSORRT_INCLUDE"]] if "MOEC_TENSORRT_INCLUDE" in os.environ else []
    return next((Path(f) for f in [*folders, *FOLDERS] if (Path(f) / "NvInferPlugin.h").is_file()), None)


def cuda_headers() -> Path | None:
    nvcc = shutil.which("nvcc")
    homes = [os.environ.get("CUDA_HOME", ""), "/usr/local/cuda", *map(str, Path("/usr/local").glob("cuda-*"))]
    homes += [str(Path(nvcc).resolve().parents[1])] if nvcc else []
    found = (Path(home) / "include" for home in homes if home)
    return next((folder for folder in found if (folder / "cuda_runtime_api.h").is_file()), None)


def check(tmp_path: Path, header_root: Path) -> subprocess.CompletedProcess:
    headers, cuda = tensorrt_headers(), cuda_headers()
    if headers is None or cuda is None:
        pytest.skip("no TensorRT headers here (set MOEC_TENSORRT_INCLUDE), or no CUDA headers")
    program = tmp_path / "abi_check"
    includes = [f"-I{folder}" for folder in (header_root, headers, cuda)]
    subprocess.run(["g++", "-std=c++17", "-w", *includes, SOURCE, "-o", program], check=True)
    return subprocess.run([program], capture_output=True, text=True)


def test_our_header_equals_the_official_one(tmp_path):
    result = check(tmp_path, ROOT / "plugins")
    assert result.returncode == 0, result.stdout


@pytest.mark.parametrize(
    ("old", "new", "names"),
    [
        ("kBF16 = 7", "kBF16 = 8", "DataType::kBF16"),
        (
            "DataType type;\n  TensorFormat format;",
            "TensorFormat format;\n  DataType type;",
            "PluginTensorDesc::type",
        ),
        ('"PLUGIN_V3ONE_BUILD", 2', '"PLUGIN_V3ONE_BUILD", 1', "IPluginV3OneBuildV2"),
        (
            "virtual IPluginV3 *clone()",
            "virtual void added() {}\n  virtual IPluginV3 *clone()",
            "IPluginV3::clone",
        ),
    ],
)
def test_a_planted_difference_is_found(tmp_path, old, new, names):
    text = (ROOT / "plugins/tensorrt/trt_plugin_abi.h").read_text()
    assert old in text
    (tmp_path / "tensorrt").mkdir()
    (tmp_path / "tensorrt/trt_plugin_abi.h").write_text(text.replace(old, new))
    result = check(tmp_path, tmp_path)
    assert result.returncode > 0
    assert names in result.stdout
