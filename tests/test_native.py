"""Where the compiled libraries are looked for."""

import os

import pytest

import moec
from moec import native
from moec.errors import MoecError


def library(folder, age: int):
    path = folder / "_native" / "libmoec_cpu.so"
    path.parent.mkdir(parents=True)
    path.write_bytes(b"")
    os.utime(path, (1e9 - age, 1e9 - age))
    return path


@pytest.fixture
def package(tmp_path, monkeypatch):
    """A package in two folders, as an editable installation has it."""
    folders = [tmp_path / "site", tmp_path / "source"]
    monkeypatch.setattr(moec, "__path__", [str(folder) for folder in folders])
    monkeypatch.delenv("MOEC_NATIVE_DIR", raising=False)
    return folders


def test_the_library_built_last_is_taken(package):
    library(package[0], age=100)
    newest = library(package[1], age=0)
    assert native.cpu_library() == newest


def test_any_folder_of_the_package_will_do(package):
    newest = library(package[1], age=0)
    assert native.cpu_library() == newest


def test_the_environment_comes_first(package, tmp_path, monkeypatch):
    library(package[0], age=0)
    own = library(tmp_path / "own", age=500)
    monkeypatch.setenv("MOEC_NATIVE_DIR", str(own.parent))
    assert native.cpu_library() == own


def test_a_missing_library_says_how_to_get_it(package):
    with pytest.raises(MoecError, match="cmake -S plugins"):
        native.cpu_library()
