"""tests/gpu/harness.cu compiles, links with the kernels and loads on a machine without a GPU."""

import ctypes
import subprocess

import numpy as np
import pytest

from moec.compile.gpu import Gpu
from moec.compile.targets import has_module
from moec.reference.kv_cache import KVLayout
from tests.helpers.gpu import engine_module, unusable, why_no_engine, why_no_gpu
from tests.helpers.gpu_kernels import gpu_library, harness
from tests.helpers.kernels import MoeParams
from tests.helpers.kv_cases import make_case, make_step, run_kernel
from tests.helpers.simt import SimtError, pointer

FUNCTIONS = {
    "run_attention", "run_moe", "run_linear", "run_activation", "e4m3_codes", "e4m3_values",
    "params_bytes", "read_error_flag", "set_replays",
}  # fmt: skip


def test_harness_links_and_loads():
    lib = gpu_library("sm_80")
    assert all(hasattr(lib, name) for name in FUNCTIONS)
    shown = subprocess.run(["ldd", "-r", str(harness("sm_80"))], capture_output=True, text=True, check=True)
    assert "undefined symbol" not in shown.stdout + shown.stderr
    assert "not found" not in shown.stdout


def test_harness_reports_the_cuda_error(rng):
    if why_no_gpu() is None:
        pytest.skip("there is a GPU: tests/gpu runs the harness")
    lib = gpu_library("sm_80")
    case = make_case(rng, KVLayout("mkv2", 1, 64, 64, context=100), 1, [10])
    with pytest.raises(SimtError, match=r"cudaMalloc: cudaError\w+, \w+"):
        run_kernel(lib, case, make_step(rng, case, [0], [1], 1))
    assert lib.read_error_flag() == -1
    assert lib.e4m3_values(pointer(np.empty(256, np.float32))) == 1
    assert np.isnan(lib.run_activation(ctypes.byref(MoeParams()), 1.0, 1.0))


def test_reasons_for_skipping():
    assert unusable([]) == "no GPU: the NVIDIA driver lists none"
    assert "Tesla V100 is sm_70" in unusable([Gpu("Tesla V100", "sm_70", 0)])
    assert unusable([Gpu("A100", "sm_80", 0)]) is None
    assert engine_module("sm_89") == ("tensorrt_rtx" if has_module("tensorrt_rtx") else None)


@pytest.mark.skipif(has_module("tensorrt"), reason="TensorRT 11 is installed")
def test_no_engine_for_an_architecture_of_tensorrt_11():
    assert engine_module("sm_90") is None
    assert "TensorRT 11 is not installed" in why_no_engine(Gpu("H100", "sm_90", 0))
