"""Progress of long work: bars on a terminal, plain lines in a log, nothing for library callers.

with progress.phase("Packing experts", total=nbytes) as task:
    task.advance(4096)
    task.note("layer 3")
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, SpinnerColumn, TaskProgressColumn, TextColumn, TimeElapsedColumn
from rich.progress import Progress as RichBars
from rich.table import Table


class Task:
    """What a running phase is told; the silent one only keeps its last note."""

    def __init__(self) -> None:
        self.done = 0.0
        self.text = ""

    def advance(self, amount: float = 1) -> None:
        """Count `amount` more units as done."""
        self.done += amount

    def note(self, text: str) -> None:
        """Say what is being done now; the last note stays in the phase's closing line."""
        self.text = text


class Progress:
    """Silent progress: measures phases and keeps warnings, prints nothing.

    Attributes:
        seconds: Wall time of each finished phase.
        warnings: Everything that was passed to `warn`.
    """

    def __init__(self) -> None:
        self.seconds: dict[str, float] = {}
        self.warnings: list[str] = []

    @contextmanager
    def phase(self, name: str, total: float | None = None) -> Iterator[Task]:
        """One step of the work; `total` in any unit that `Task.advance` is called with."""
        start = time.perf_counter()
        with self._task(name, total) as task:
            yield task
        self.seconds[name] = time.perf_counter() - start
        self._finished(name, task, self.seconds[name])

    def info(self, text: str) -> None:
        """A line for the user."""

    def warn(self, text: str) -> None:
        """Something the user should know that is no error."""
        self.warnings.append(text)

    def table(self, table: SizeTable) -> None:
        """A table for the user."""

    @contextmanager
    def _task(self, name: str, total: float | None) -> Iterator[Task]:
        yield Task()

    def _finished(self, name: str, task: Task, seconds: float) -> None:
        pass


@dataclass
class SizeTable:
    """Rows of strings under column titles; numbers are right-aligned from the third column on."""

    title: str
    columns: list[str]
    rows: list[list[str]] = field(default_factory=list)

    def render(self) -> Table:
        """The table for a rich console."""
        table = Table(title=self.title, title_justify="left", title_style="bold")
        for index, name in enumerate(self.columns):
            table.add_column(name, justify="left" if index < 2 else "right")
        for row in self.rows:
            table.add_row(*row)
        return table


class _BarTask(Task):
    def __init__(self, bars: RichBars, name: str, total: float | None) -> None:
        super().__init__()
        self._bars = bars
        self._id = bars.add_task(escape(name), total=total, note="")

    def advance(self, amount: float = 1) -> None:
        super().advance(amount)
        self._bars.advance(self._id, amount)

    def note(self, text: str) -> None:
        super().note(text)
        self._bars.update(self._id, note=escape(text))


class ConsoleProgress(Progress):
    """Progress for people: a bar while a phase runs (terminals only), one line when it is done."""

    def __init__(self, console: Console | None = None) -> None:
        super().__init__()
        self.console = console or Console(stderr=True, highlight=False)

    def info(self, text: str) -> None:
        self.console.print(text, markup=False, soft_wrap=True)

    def warn(self, text: str) -> None:
        super().warn(text)
        self.console.print(f"warning: {text}", markup=False, style="yellow", soft_wrap=True)

    def table(self, table: SizeTable) -> None:
        self.console.print(table.render())

    @contextmanager
    def _task(self, name: str, total: float | None) -> Iterator[Task]:
        if not self.console.is_terminal:
            yield Task()
            return
        with RichBars(*_columns(total), console=self.console, transient=True) as bars:
            yield _BarTask(bars, name, total)

    def _finished(self, name: str, task: Task, seconds: float) -> None:
        note = f"  {task.text}" if task.text else ""
        self.console.print(f"{name:<28} {seconds:7.1f} s{note}", markup=False, soft_wrap=True)


def _columns(total: float | None) -> list:
    measure = [] if total is None else [BarColumn(), TaskProgressColumn()]
    return [
        SpinnerColumn(),
        TextColumn("{task.description}"),
        *measure,
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}"),
    ]
