"""`moec`: the command line. Subcommands load when they are called, so that `--help` is instant."""

from __future__ import annotations

import errno
import importlib
import os
import sys
import tempfile
import traceback
from collections.abc import Sequence

import click

from moec.errors import MoecError
from moec.version import __version__

_OUTPUT_FAILS = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO}
_COMMANDS = {
    "build": "Compile a Hugging Face MoE checkpoint into a bundle.",
    "run": "Generate text from a bundle.",
    "doctor": "Show what this machine has, what is missing and how to get it.",
}
_EXAMPLES = """\b
Examples:
  moec build ./checkpoint -o ./bundle
  moec run ./bundle --prompt "Why is the sky blue?"
  moec run ./bundle -i
  moec doctor
"""


class LazyGroup(click.Group):
    """A group whose commands are the modules `moec.cli.NAME`, each with a command called NAME."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(_COMMANDS)

    def get_command(self, ctx: click.Context, name: str) -> click.Command | None:
        if name not in _COMMANDS:
            return None
        return getattr(importlib.import_module(f"moec.cli.{name}"), name)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):  # without importing any of them
            formatter.write_dl(list(_COMMANDS.items()))


@click.group(
    cls=LazyGroup,
    epilog=_EXAMPLES,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
)
@click.version_option(__version__, prog_name="moec")
def moec() -> None:
    """Compile Mixture-of-Experts language models ahead of time, and run them."""


def main(arguments: Sequence[str] | None = None) -> None:
    """Runs the command line and exits: 0, 1 for a bug, 2 for a mistake of the user, 130 for Ctrl-C."""
    sys.exit(execute(sys.argv[1:] if arguments is None else arguments))


def execute(arguments: Sequence[str]) -> int:
    """Runs the command line and returns the exit code; every error becomes one message on stderr."""
    try:
        result = moec.main(args=list(arguments), prog_name="moec", standalone_mode=False)
        return result if isinstance(result, int) else 0
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (click.Abort, KeyboardInterrupt):
        return _say("interrupted", 130)
    except MoecError as error:
        return _say(f"error: {error}", 2)
    except BrokenPipeError:  # the reader of our output has gone, e.g. `moec run ... | head`
        _discard_output()
        return 1
    except OSError as error:
        return _system_error(error)
    except Exception as error:
        return _report_bug(error)


def _system_error(error: OSError) -> int:
    """What the system refuses: a file that may not be read, or our own output where no file is named."""
    if error.filename is not None and error.strerror:
        return _say(f"error: {error.strerror} ({os.fsdecode(error.filename)})", 2)
    if error.errno in _OUTPUT_FAILS:
        _discard_output()
        return _say(f"error: {error.strerror} (standard output)", 2)
    return _report_bug(error)


def _discard_output() -> None:
    """Python flushes stdout at its end, which must not fail once more."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _say(message: str, code: int) -> int:
    if os.environ.get("MOEC_TRACEBACK") == "1" and code == 2:
        traceback.print_exc()
    print(message, file=sys.stderr)
    return code


def _report_bug(error: Exception) -> int:
    if os.environ.get("MOEC_TRACEBACK") == "1":
        traceback.print_exc()
        return 1
    with tempfile.NamedTemporaryFile("w", prefix="moec-error-", suffix=".log", delete=False) as log:
        log.write(f"moec {__version__}\n{sys.argv}\n{traceback.format_exc()}")
    summary = " ".join(f"{type(error).__name__}: {error}".split())
    return _say(f"internal error: {summary[:300]}\n  The traceback is in {log.name}", 1)


if __name__ == "__main__":
    main()
