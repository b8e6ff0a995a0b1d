"""The CMake build of plugins/kernels with nvcc: every target compiles and no kernel spills registers."""

import re
import shutil
import subprocess

import pytest

from tests.helpers.simt import PLUGINS

TARGETS = ("80", "86", "89", "90", "100", "120")
KERNELS = (
    "prepare_rows", "flush_blocks", "flush_int8_blocks", "append_rows", "prepare_queries", "attend_tiles",
    "join_splits",
    "widen_hidden", "route_tokens", "expert_up", "expert_down", "linear_tile",
    "add_rms_norm_row",
)  # fmt: skip
ENTRY = re.compile(r"Compiling entry function '(\S+)' for 'sm_(\d+)'")
SPILLS = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
REGISTERS = re.compile(r"Used (\d+) registers")


def run(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, (done.stdout + done.stderr)[-4000:]
    return done.stdout + done.stderr


def build(folder, targets):
    """What ptxas prints while moec_kernels is built from nothing; skips where there is no nvcc."""
    if not shutil.which("cmake"):
        pytest.skip("no cmake on the PATH")
    archs = f"-DMOEC_CUDA_ARCHS={';'.join(targets)}"
    configured = run("cmake", "-S", str(PLUGINS), "-B", str(folder), archs, "-DMOEC_PTXAS_VERBOSE=ON")
    if "no nvcc" in configured:
        pytest.skip("no nvcc: on the PATH, in /usr/local/cuda, or from PyPI")
    return run("cmake", "--build", str(folder), "--target", "moec_kernels")


def reports(text):
    """(mangled name, target, (stack, stores, loads), registers) of every compiled kernel."""
    found, entry, spills = [], None, None
    for line in text.splitlines():
        if match := ENTRY.search(line):
            entry = match.groups()
        elif match := SPILLS.search(line):
            spills = tuple(map(int, match.groups()))
        elif (match := REGISTERS.search(line)) and entry:
            found.append((*entry, spills, int(match.group(1))))
            entry = None
    return found


def check_no_spills(folder, targets):
    found = reports(build(folder, targets))
    for target in targets:
        names = [name for name, arch, _, _ in found if arch == target]
        assert not [kernel for kernel in KERNELS if not any(kernel in name for name in names)], target
    assert not [entry for entry in found if entry[2] != (0, 0, 0)]
    print("most registers:", max((registers, name, arch) for name, arch, _, registers in found))
    return folder / "kernels" / "libmoec_kernels.a"


def test_one_target_has_no_spills(tmp_path):
    check_no_spills(tmp_path, ("90",))


@pytest.mark.slow
def test_every_target_has_no_spills_and_ptx_is_there(tmp_path):
    library = check_no_spills(tmp_path, TARGETS)
    cuobjdump = shutil.which("cuobjdump") or shutil.which("/usr/local/cuda/bin/cuobjdump")
    if cuobjdump:
        assert "sm_80.ptx" in run(cuobjdump, "--list-ptx", str(library))
