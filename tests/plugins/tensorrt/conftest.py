import subprocess
from pathlib import Path

import pytest

from moec.compile.plugins import find_plugin_library

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="session")
def library() -> Path:
    found = find_plugin_library()
    if found is None:
        pytest.skip("libmoec_trt.so is not built: no nvcc")
    return found


@pytest.fixture(scope="session")
def probe(tmp_path_factory) -> Path:
    program = tmp_path_factory.mktemp("probe") / "probe"
    source = Path(__file__).with_name("plugin_probe.cpp")
    command = ["g++", "-std=c++17", "-O1", "-Wall", f"-I{ROOT / 'plugins'}", source, "-o", program, "-ldl"]
    subprocess.run(command, check=True)
    return program
