"""The command line as a user meets it: help, errors, exit codes."""

import errno
import subprocess
import sys

import click
import pytest

from moec.cli import main
from moec.errors import MoecError
from moec.version import __version__

HEAVY = ("torch", "transformers", "onnxruntime", "onnx", "numpy")


def moec(*arguments, **options):
    command = [sys.executable, "-m", "moec.cli.main", *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, **options)


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["run", "--help"], ["doctor", "--help"]])
def test_help_is_instant(arguments):
    """Nothing heavy is imported."""
    code = (
        "import sys; from moec.cli.main import execute; code = execute(sys.argv[1:]);"
        f"sys.exit(code or [m for m in {HEAVY} if m in sys.modules] or 0)"
    )
    command = [sys.executable, "-c", code, *arguments]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stderr


def test_importing_the_runtime_needs_no_torch():
    code = (
        "import sys, moec.runtime; sys.exit([m for m in ('torch', 'transformers') if m in sys.modules] or 0)"
    )
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_help_has_commands_and_examples():
    text = moec("--help").stdout
    for word in ("build", "run", "doctor", "Examples:", "moec run ./bundle --prompt"):
        assert word in text


def test_version():
    assert moec("--version").stdout.strip() == f"moec, version {__version__}"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["frobnicate"], "No such command 'frobnicate'"),
        (["run"], "Missing argument 'BUNDLE'"),
        (["run", "x"], "Give either --prompt TEXT or -i"),
        (["run", "x", "-i", "--raw"], "exclude each other"),
        (
            ["run", "/no/such/bundle", "--prompt", "x"],
            "error: There is no bundle at this path (/no/such/bundle)",
        ),
    ],
)
def test_mistakes_are_one_message_and_code_2(arguments, message):
    result = moec(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def failing_command(monkeypatch, error):
    @click.command()
    def doctor():
        raise error

    monkeypatch.setattr("moec.cli.doctor.doctor", doctor)
    return main.execute(["doctor"])


def test_user_error(monkeypatch, capsys):
    error = MoecError("The folder is gone", where="x/y", hint="Look elsewhere")
    assert failing_command(monkeypatch, error) == 2
    assert capsys.readouterr().err == "error: The folder is gone (x/y)\n  Look elsewhere\n"


def test_what_the_system_refuses(monkeypatch, capsys):
    assert failing_command(monkeypatch, PermissionError(errno.EACCES, "Permission denied", "x/y")) == 2
    assert capsys.readouterr().err == "error: Permission denied (x/y)\n"
    assert failing_command(monkeypatch, OSError("a library's own words")) == 1
    assert "internal error" in capsys.readouterr().err


def test_output_that_cannot_be_written():
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "moec.cli.main", "doctor"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, timeout=120)
    assert (result.returncode, result.stderr) == (2, "error: No space left on device (standard output)\n")


def test_the_package_is_the_command():
    command = [sys.executable, "-m", "moec", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.stdout.strip() == f"moec, version {__version__}"


def test_interrupt(monkeypatch, capsys):
    assert failing_command(monkeypatch, KeyboardInterrupt()) == 130
    assert capsys.readouterr().err.strip() == "interrupted"


def test_bug_is_one_line_and_a_log(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    assert failing_command(monkeypatch, ZeroDivisionError("secret detail")) == 1
    err = capsys.readouterr().err
    assert err.startswith("internal error: ZeroDivisionError: secret detail\n")
    assert "Traceback" not in err
    (log,) = tmp_path.iterdir()
    assert str(log) in err
    assert "Traceback" in log.read_text()


@pytest.mark.parametrize(("error", "code"), [(ValueError("x"), 1), (MoecError("x"), 2)])
def test_traceback_on_request(monkeypatch, capsys, error, code):
    monkeypatch.setenv("MOEC_TRACEBACK", "1")
    assert failing_command(monkeypatch, error) == code
    assert "Traceback" in capsys.readouterr().err
