"""What every benchmark prints and keeps: a table on the screen, JSON in benchmarks/results/ (not in git)."""

from __future__ import annotations

import json
import platform
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from rich.console import Console
from rich.table import Table

REPO = Path(__file__).parents[1]
RESULTS = REPO / "benchmarks" / "results"


def show(title: str, rows: Sequence[Mapping[str, object]]) -> None:
    """Print rows of equal keys as a table; floats with three significant digits after the point at most."""
    table = Table(title=title, title_justify="left")
    for number, name in enumerate(rows[0]):
        table.add_column(name, justify="right" if number else "left")
    for row in rows:
        table.add_row(*[_text(value) for value in row.values()])
    Console(width=110).print(table)


def save(name: str, content: Mapping[str, object]) -> Path:
    """Write benchmarks/results/NAME.json with the machine and the time; returns its path."""
    RESULTS.mkdir(parents=True, exist_ok=True)
    path = RESULTS / f"{name}.json"
    machine = {"processor": _processor(), "python": platform.python_version()}
    stamp = datetime.now(UTC).isoformat(timespec="seconds")
    path.write_text(json.dumps({"time": stamp, "machine": machine, **content}, indent=2) + "\n")
    print(f"written: {path.relative_to(REPO)}")
    return path


def _text(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()
