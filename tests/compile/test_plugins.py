import pytest

import moec
from moec.compile.plugins import LIBRARY, find_plugin_library, plugin_library
from moec.errors import MoecError


@pytest.fixture
def nowhere(monkeypatch, tmp_path):
    monkeypatch.delenv("MOEC_NATIVE_DIR", raising=False)
    monkeypatch.setattr(moec, "__path__", [str(tmp_path / "package")])
    return tmp_path


def test_a_missing_library_says_how_to_get_it(nowhere):
    assert find_plugin_library() is None
    with pytest.raises(MoecError, match="not built") as error:
        plugin_library()
    assert "nvcc" in str(error.value)
    assert "--target cpu" in str(error.value)


def test_the_package_s_native_folder_is_searched(nowhere):
    folder = nowhere / "package" / "_native"
    folder.mkdir(parents=True)
    (folder / LIBRARY).touch()
    assert plugin_library() == folder / LIBRARY


def test_the_environment_comes_first(nowhere, monkeypatch):
    for folder in (nowhere / "package" / "_native", nowhere / "mine"):
        folder.mkdir(parents=True)
        (folder / LIBRARY).touch()
    monkeypatch.setenv("MOEC_NATIVE_DIR", str(nowhere / "mine"))
    assert plugin_library() == nowhere / "mine" / LIBRARY
