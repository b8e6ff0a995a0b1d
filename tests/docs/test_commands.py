"""Every command and every Python block of the README and docs/ runs, document by document, in reading order.

By default `samples/smolmoe/checkpoint` is a tiny random model; the slow test uses the sample itself. `make`
commands are only resolved here (they would call this test): .ci/run runs them.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType

from tests.docs.blocks import DOCUMENTS, REPO, Block, blocks
from tests.helpers.gguf_model import write_gguf
from tests.helpers.sample import sample_checkpoint
from tests.helpers.tiny import tiny_checkpoint, tiny_model, tiny_tokenizer

SHELL = ("console", "sh")


def _environment(folder: Path) -> dict[str, str]:
    folders = [str(Path(sys.executable).parent), str(folder / "bin"), os.environ["PATH"]]
    python_path = [str(REPO), *filter(None, [os.environ.get("PYTHONPATH")])]
    changes = {"PATH": os.pathsep.join(folders), "PYTHONPATH": os.pathsep.join(python_path)}
    return {**os.environ, **changes, "COLUMNS": "100"}


def _run(command: list[str], folder: Path) -> None:
    done = subprocess.run(
        command, cwd=folder, env=_environment(folder), capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"


def _follow(block: Block, folder: Path) -> None:
    if block.language == "python":
        _run([sys.executable, "-c", block.text], folder)
        return
    for command in block.commands:
        if command.split()[0] not in ("make", "git", "cd"):  # a clone and its targets: .ci/run
            _run(["bash", "-c", command], folder)


def _follow_all(checkpoint: Path, folder: Path) -> None:
    (folder / "samples" / "smolmoe").mkdir(parents=True)
    (folder / "samples" / "smolmoe" / "checkpoint").symlink_to(checkpoint)
    (folder / "build").mkdir()
    _downloaded_gguf(folder / "downloads")
    _moec_command(folder / "bin")
    for block in blocks(*SHELL, "python"):
        _follow(block, folder)


def _downloaded_gguf(folder: Path) -> None:
    """The GGUF file that a reader has: a tiny random model."""
    folder.mkdir()
    model = tiny_model("qwen3_moe", moe_intermediate_size=64)
    write_gguf(folder / "model-Q8_0.gguf", model, GGMLQuantizationType.Q8_0, tiny_tokenizer())


def _moec_command(folder: Path) -> None:
    """`moec` for an environment where it is not installed; an installed one comes first."""
    folder.mkdir()
    (folder / "moec").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m moec.cli.main "$@"\n')
    (folder / "moec").chmod(0o755)


def test_commands_run_on_a_tiny_model(tmp_path: Path) -> None:
    _follow_all(tiny_checkpoint(tmp_path / "tiny"), tmp_path / "reader")


@pytest.mark.slow
def test_commands_run_on_the_sample(tmp_path: Path) -> None:
    _follow_all(sample_checkpoint(), tmp_path)


def _make_commands() -> list[str]:
    commands = [command for block in blocks(*SHELL) for command in block.commands]
    return sorted({command for command in commands if command.startswith("make ")})


@pytest.mark.parametrize("command", _make_commands())
def test_make_targets_exist(command: str) -> None:
    done = subprocess.run([*command.split(), "-n"], cwd=REPO, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("index", ["", "some-index"])
def test_torch_comes_from_the_index_that_is_named(index: str, tmp_path: Path) -> None:
    command = ["make", "-n", "setup", f"VENV={tmp_path}", f"TORCH_INDEX={index}"]
    done = subprocess.run(command, cwd=REPO, capture_output=True, text=True, check=True)
    (line,) = (line for line in done.stdout.splitlines() if "pip install" in line and '"torch==' in line)
    assert ("--index-url" in line) == bool(index)
    assert f'"{index}"' in line or not index


def test_a_sample_of_an_older_recipe_is_made_anew(tmp_path: Path) -> None:
    shutil.copy(REPO / "Makefile", tmp_path)
    checkpoint = "samples/smolmoe/checkpoint/config.json"
    recipe = [file.relative_to(REPO) for file in (REPO / "samples" / "smolmoe").iterdir() if file.is_file()]
    for age, name in enumerate(["pyproject.toml", "plugins/x", *recipe, ".venv/ready", checkpoint]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).touch()
        os.utime(tmp_path / name, (1e9 + age, 1e9 + age))
    os.utime(tmp_path / "Makefile", (1e9, 1e9))
    ask = ["make", "-q", "VENV=.venv", checkpoint]
    assert subprocess.run(ask, cwd=tmp_path, check=False).returncode == 0
    (tmp_path / "samples" / "smolmoe" / "split.py").touch()
    assert subprocess.run(ask, cwd=tmp_path, check=False).returncode == 1


def test_readme_starts_with_the_two_commands() -> None:
    first_screen = "\n".join((REPO / "README.md").read_text(encoding="utf-8").splitlines()[:25])
    assert "$ make run" in first_screen
    assert "$ make test" in first_screen


def test_readme_lists_exactly_the_options_of_build() -> None:
    from moec.cli.build import build

    readme = (REPO / "README.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"^\| `(--[a-z-]+)` \|", readme, re.MULTILINE))
    known = {name for option in build.params for name in option.opts if name.startswith("--")}
    assert listed == known - {"--output"}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: path.name)
def test_relative_links_lead_somewhere(document: Path) -> None:
    for target in re.findall(r"\]\(([^)#:]+)\)", document.read_text(encoding="utf-8")):
        assert (document.parent / target).exists(), target
