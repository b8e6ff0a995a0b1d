"""The threads that share an operator's pieces: every piece once, whoever calls, whatever sleeps."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest

HERE = Path(__file__).parent
PLUGINS = HERE.parents[2] / "plugins" / "cpu"
SOURCES = [HERE / "team_stress.cpp", PLUGINS / "team.cpp", PLUGINS / "forecast.cpp"]

pytestmark = pytest.mark.skipif(shutil.which("c++") is None, reason="no C++ compiler")


def _compile(sources: list[Path], program: Path, *flags: str) -> None:
    command = ["c++", "-std=c++17", "-O1", "-g", "-Wall", "-Wextra", "-pthread", f"-I{PLUGINS}", *flags]
    subprocess.run([*command, *map(str, sources), "-o", str(program)], check=True, capture_output=True)


def _stress(program: Path, jobs: int, *, fork: bool) -> None:
    seed = int(np.random.default_rng().integers(1 << 30))
    print("seed", seed)
    run = subprocess.run(
        [str(program), str(seed), str(jobs), "fork" if fork else "-"],
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert run.returncode == 0, run.stdout + run.stderr


def test_every_piece_once(tmp_path: Path) -> None:
    _compile(SOURCES, tmp_path / "stress")
    _stress(tmp_path / "stress", 1000, fork=True)


def test_no_data_race(tmp_path: Path) -> None:
    """Under the compiler's thread sanitizer, where it works (it needs a certain layout of memory)."""
    trivial = tmp_path / "trivial.cpp"
    trivial.write_text("int main() { return 0; }\n")
    try:
        _compile([trivial], tmp_path / "trivial", "-fsanitize=thread")
        subprocess.run([str(tmp_path / "trivial")], check=True, capture_output=True)
    except subprocess.CalledProcessError:
        pytest.skip("the thread sanitizer does not work here")
    _compile(SOURCES, tmp_path / "stress", "-fsanitize=thread")
    _stress(tmp_path / "stress", 300, fork=False)
