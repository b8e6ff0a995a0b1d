import ctypes
import subprocess
from pathlib import Path

import pytest

from moec.compile import gpu

DRIVER = r"""
#include <cstddef>
#include <cstring>
extern "C" {
int cuInit(unsigned) { return 0; }
int cuDeviceGetCount(int *n) { *n = 2; return 0; }
int cuDeviceGetName(char *name, int size, int device) {
  strncpy(name, device ? "Two" : "One", size);
  return 0;
}
int cuDeviceTotalMem_v2(size_t *bytes, int device) { *bytes = (device + 1) * 1000000007ull; return 0; }
int cuDeviceGetAttribute(int *value, int attribute, int device) {
  *value = attribute == 75 ? (device ? 12 : 8) : (device ? 0 : 9);
  return 0;
}
}
"""


def test_without_a_driver_there_are_no_gpus(monkeypatch):
    monkeypatch.setattr(gpu, "driver", lambda: None)
    assert gpu.local_gpus() == []


@pytest.fixture
def driver(tmp_path) -> Path:
    """A library with the driver's entry points and two devices."""
    source, library = tmp_path / "driver.cpp", tmp_path / "libcuda.so"
    source.write_text(DRIVER)
    subprocess.run(["g++", "-shared", "-fPIC", source, "-o", library], check=True)
    return library


def test_devices_are_described(monkeypatch, driver):
    monkeypatch.setattr(gpu, "driver", lambda: ctypes.CDLL(str(driver)))
    assert gpu.local_gpus() == [
        gpu.Gpu("One", "sm_89", 1000000007),
        gpu.Gpu("Two", "sm_120", 2000000014),
    ]
