"""`moec run` on a bundle of the tiny model, in a process of its own."""

import os
import re
import shutil
import signal
import subprocess
import sys
import time

import pytest

from moec.cli.main import execute
from moec.runtime.session import Session
from moec.runtime.tokenizer import Tokenizer
from tests.helpers.bundles import tiny_bundle
from tests.helpers.permissions import obey_permissions
from tests.helpers.tiny import VOCAB, tiny_tokenizer
from tests.helpers.toy_model import ToyBackend

LAST_LINE = re.compile(
    r"prompt \d+ tokens( \(\d+ cached\))? in [\d.]+ s \| generated (?P<count>\d+) tokens, [\d.]+ tokens/s, "
    r"[\d.]+ ms/token p50, [\d.]+ p95 \| KV cache [\d.]+ MB, fp16 would take [\d.]+ MB \([\d.]+x\)"
)
COMMAND = [sys.executable, "-m", "moec.cli.main", "run"]


@pytest.fixture(scope="module")
def bundle():
    return str(tiny_bundle(context=320, batch=4))


def run(*arguments, **options):
    command = [*COMMAND, *arguments, "--threads", "1"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


def test_prompt(bundle):
    """Text on stdout, one line of numbers on stderr; the same again for the same seed."""
    first, second, other = (
        run(bundle, "--prompt", "To be", "--max-tokens", "12", "--temperature", "1", "--seed", seed)
        for seed in ("4", "4", "5")
    )
    assert first.returncode == 0, first.stderr
    assert first.stdout == second.stdout != other.stdout
    (line,) = first.stderr.splitlines()
    assert 1 <= int(LAST_LINE.match(line)["count"]) <= 12


def test_prompt_from_stdin(bundle):
    options = ["--raw", "-n", "5", "-t", "0"]
    piped = run(bundle, "--prompt", "-", *options, input="To be")
    assert piped.stdout == run(bundle, "--prompt", "To be", *options).stdout


def test_prompts_that_are_no_text(bundle):
    """Bytes that are no UTF-8, and UTF-8 where the terminal is said to know ASCII only."""
    options = [bundle, "--raw", "-n", "5", "-t", "0", "--prompt"]
    assert run(*options, b"a\xff b").stdout == run(*options, "a\ufffd b").stdout
    ascii_only = {**os.environ, "LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    known, unknown = run(*options, "é 😀"), run(*options, "é 😀", env=ascii_only)
    assert unknown.returncode == 0, unknown.stderr
    assert unknown.stderr.split(" in ")[0] == known.stderr.split(" in ")[0]  # as many tokens


def test_answer_that_cannot_be_written(bundle):
    with open("/dev/full", "w") as full:
        command = [*COMMAND, bundle, "--prompt", "a", "-n", "3"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (2, "error: No space left on device (standard output)\n")


@pytest.mark.parametrize("name", ["manifest.json", "experts.moex", "weights.safetensors", "tokenizer.json"])
def test_bundle_that_may_not_be_read(bundle, tmp_path, name):
    copy = shutil.copytree(bundle, tmp_path / "copy")
    (copy / name).chmod(0)
    result = run(str(copy), "--prompt", "a", preexec_fn=obey_permissions)
    assert (result.returncode, result.stderr) == (2, f"error: Permission denied ({copy / name})\n")


def test_context_full_is_said(bundle):
    """Near the end of the context the answer is cut there, unless the model ended it before."""
    result = run(bundle, "--raw", "--prompt", "x" * 319, "-n", "4000", "-t", "0")
    assert result.returncode == 0, result.stderr
    generated = int(LAST_LINE.match(result.stderr)["count"])
    assert generated <= 2
    assert generated < 2 or result.stderr.rstrip().endswith("stopped: the context is full")


def test_prompt_too_long(bundle):
    result = run(bundle, "--raw", "--prompt", "Macbeth " * 2000)
    assert result.returncode == 2
    assert re.match(r"error: The prompt has \d+ tokens, but a slot of this bundle holds 320\n", result.stderr)


def test_tensorrt_says_what_is_missing(bundle):
    result = run(bundle, "--prompt", "x", "--device", "tensorrt")
    assert result.returncode == 2
    assert "cannot run on TensorRT here, missing:" in result.stderr


def test_bad_option(bundle):
    result = run(bundle, "--prompt", "x", "--temperature", "-3")
    assert result.returncode == 2
    assert "temperature is -3.0, but must be >= 0" in result.stderr


def test_conversation_keeps_its_cache(bundle):
    talk = "Who goes there?\nStand and unfold yourself.\n/reset\nWho goes there?\n/quit\nnot read\n"
    result = run(bundle, "-i", "-n", "6", "-t", "0", input=talk)
    assert result.returncode == 0, result.stderr
    lines = [line for line in result.stderr.splitlines() if line.startswith("prompt")]
    assert len(lines) == 3
    assert "cached" in lines[1]


@pytest.fixture
def interrupted(monkeypatch, tmp_path):
    """Runs `moec run` over a toy device that gets `count` Ctrl-C in its fifth step; returns the exit code."""
    tiny_tokenizer().save_pretrained(tmp_path)

    def run_with(count):
        backend = ToyBackend(1, 100_000, VOCAB, seed=0)
        step = backend.step

        def step_with_signals(*arguments):
            for _ in range(count if len(backend.calls) == 4 else 0):
                os.kill(os.getpid(), signal.SIGINT)
            return step(*arguments)

        backend.step = step_with_signals
        session = Session(backend, Tokenizer.from_folder(tmp_path))
        monkeypatch.setattr("moec.runtime.load", lambda *_args, **_options: session)
        return execute(["run", "bundle", "--raw", "--prompt", "a", "-n", "90000", "-t", "1"])

    return run_with


def test_ctrl_c_stops_cleanly(interrupted, capsys):
    """The first Ctrl-C ends the answer with its statistics and exit code 130."""
    handler = signal.getsignal(signal.SIGINT)
    assert interrupted(1) == 130
    (line,) = capsys.readouterr().err.splitlines()
    assert LAST_LINE.match(line)["count"] == "5"
    assert line.endswith("stopped by Ctrl-C")
    assert signal.getsignal(signal.SIGINT) is handler


def test_second_ctrl_c_interrupts(interrupted, capsys):
    assert interrupted(2) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_ctrl_c_in_a_process(bundle):
    """While the bundle loads or after the answer it is one word, never a traceback."""
    command = [*COMMAND, bundle, "-i", "--threads", "1"]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    process = subprocess.Popen(command, text=True, **pipes)
    assert "Ask away" in process.stderr.readline()
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    assert (process.returncode, error.strip()) == (130, "interrupted")


def test_reader_that_goes_away(bundle):
    command = [*COMMAND, bundle, "--raw", "--prompt", "a", "-n", "300", "-t", "1", "--threads", "1"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    process.stdout.read(1)
    process.stdout.close()
    deadline = time.monotonic() + 60
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert process.returncode is not None
    assert "Traceback" not in process.stderr.read()
