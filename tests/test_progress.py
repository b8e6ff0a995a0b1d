"""Progress measures phases, keeps warnings, and writes readable plain lines without a terminal."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from moec.progress import ConsoleProgress, Progress, SizeTable


def plain() -> tuple[ConsoleProgress, io.StringIO]:
    stream = io.StringIO()
    return ConsoleProgress(Console(file=stream, width=100)), stream


def test_the_silent_one_measures():
    progress = Progress()
    with progress.phase("Work", 2) as task:
        task.advance()
        task.note("half")
    progress.warn("odd")
    assert progress.seconds["Work"] >= 0
    assert progress.warnings == ["odd"]


def test_a_log_gets_one_line_a_phase():
    progress, stream = plain()
    with progress.phase("Packing [dense]", 2) as task:
        task.advance(2)
        task.note("2 tensors [int4]")
    progress.warn("layer 3: [odd]")
    lines = stream.getvalue().splitlines()
    assert lines[0].startswith("Packing [dense]")
    assert lines[0].endswith("2 tensors [int4]")
    assert lines[1] == "warning: layer 3: [odd]"
    assert "\x1b" not in stream.getvalue()


def test_a_terminal_gets_a_bar():
    stream = io.StringIO()
    progress = ConsoleProgress(Console(file=stream, width=100, force_terminal=True))
    with progress.phase("Packing", 2) as task:
        task.note("x")
        task.advance(2)
    assert "\x1b" in stream.getvalue()


def test_a_failing_phase_has_no_closing_line():
    progress, stream = plain()
    with pytest.raises(KeyboardInterrupt), progress.phase("Packing"):
        raise KeyboardInterrupt
    assert stream.getvalue() == ""


def test_a_table_is_printed():
    progress, stream = plain()
    progress.table(SizeTable("Sizes", ["part", "format", "MB"], [["dense", "int4", "1.0"]]))
    assert "dense" in stream.getvalue()
