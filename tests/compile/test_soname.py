import struct
import subprocess
import sys

import pytest

from moec.compile.soname import alias, stub
from moec.errors import MoecError


def test_the_stub_names_itself_and_its_dependency(tmp_path):
    path = tmp_path / "stub.so"
    path.write_bytes(stub("libnew.so", "libold.so.1", "x86_64"))
    text = subprocess.run(["readelf", "-dlW", path], capture_output=True, text=True, check=True).stdout
    assert "Library soname: [libnew.so]" in text
    assert "Shared library: [libold.so.1]" in text
    assert "GNU_STACK" in text
    assert "RWE" not in text


def test_the_stub_is_for_the_machine_asked_for():
    assert struct.unpack_from("<H", stub("a", "b", "aarch64"), 18) == (183,)


def test_an_alias_resolves_to_the_loaded_library():
    code = """
import ctypes
from moec.compile.soname import alias
alias("libmoec_test_alias.so", "libm.so.6")
alias("libmoec_test_alias.so", "libm.so.6")
cosine = ctypes.CDLL("libmoec_test_alias.so").cos
cosine.restype, cosine.argtypes = ctypes.c_double, [ctypes.c_double]
print(cosine(0.0))
"""
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "1.0"


def test_a_library_that_is_not_there_cannot_be_aliased():
    with pytest.raises(MoecError, match=r"libmoec_no_such\.so is not loaded"):
        alias("libmoec_x.so", "libmoec_no_such.so")
