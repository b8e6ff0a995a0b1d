"""`moec build` as a user meets it: output, exit codes, one message, nothing left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

from moec.bundle.reader import open_bundle
from moec.cli.main import execute
from tests.helpers.tiny import shakespeare, tiny_checkpoint


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return tiny_checkpoint(tmp_path_factory.mktemp("cli") / "model")


@pytest.fixture
def text(tmp_path_factory):
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(shakespeare(1200), encoding="utf-8")
    return path


def test_a_build_shows_passes_and_sizes(model, text, tmp_path, capsys):
    bundle = tmp_path / "my [red]bundle"
    code = execute(["build", str(model), "-o", str(bundle), "--calibration", str(text), "--context", "128"])
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    for part in (
        "Exporting the graph",
        "attention",
        "router",
        "Packing experts",
        "KV cache, one slot of 128",
    ):
        assert part in out
    assert out.splitlines()[-1] == f"{bundle} is ready: moec run '{bundle}' --prompt \"...\""
    assert open_bundle(bundle).manifest.context == 128


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kv", "int1"], "--kv int1 is unknown"),
        (["--context", "4097"], "context 4097 is longer than the model's 1024"),
        (["--batch", "0"], "batch is 0"),
        (["--calibration", "/nowhere.txt"], "cannot be read"),
    ],
)
def test_mistakes_exit_with_2_and_one_message(model, tmp_path, capsys, arguments, message):
    assert execute(["build", str(model), "-o", str(tmp_path / "b"), *arguments]) == 2
    err = capsys.readouterr().err
    assert message in err
    assert err.startswith("error: ")
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


def test_a_missing_model(tmp_path, capsys):
    assert execute(["build", str(tmp_path / "no"), "-o", str(tmp_path / "b")]) == 2
    assert "does not exist" in capsys.readouterr().err


def test_help_has_examples(capsys):
    assert execute(["build", "--help"]) == 0
    out = capsys.readouterr().out
    assert "moec build ./checkpoint -o ./bundle --context 8192" in out
    assert "mkv2-lean" in out


def test_help_loads_nothing_heavy():
    code = "import sys, moec.cli.build; print([m for m in ('torch', 'onnxruntime') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


@pytest.mark.parametrize(("number", "code"), [(signal.SIGINT, 130), (signal.SIGTERM, 143)])
def test_a_signal_in_mid_build(model, tmp_path, number, code):
    command = [sys.executable, "-m", "moec.cli.main", "build", str(model), "-o", str(tmp_path / "b")]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ, "PYTHONUNBUFFERED": "1"}
    )
    for line in process.stdout:  # the exporter is next, and takes seconds
        if line.startswith(b"Reading the checkpoint"):
            break
    while not (begun := any(tmp_path.glob("*.building"))) and process.poll() is None:
        time.sleep(0.1)
    time.sleep(0.5)
    assert begun
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    assert process.returncode == code
    assert b"Traceback" not in err
    assert list(tmp_path.iterdir()) == []
