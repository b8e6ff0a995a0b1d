"""Nothing in moec imports upward: checked on the syntax tree, imports inside functions included."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

MOEC = Path(__file__).parents[1] / "moec"
TIERS = (
    ("errors", "progress", "version"),
    ("reference", "dialect", "native", "checkpoint", "bundle"),
    ("frontend", "calibrate", "rewrite", "pack"),
    ("compile", "simulate", "runtime", "quantizer"),
    ("builder",),
    ("cli",),
    ("__main__",),
)
LEVEL = {name: level for level, tier in enumerate(TIERS) for name in tier}
MODULES = sorted(path for path in MOEC.rglob("*.py") if path != MOEC / "__init__.py")


def _package(path: Path) -> str:
    return path.relative_to(MOEC).parts[0].removesuffix(".py")


def _imports(path: Path) -> Iterator[tuple[int, str]]:
    """(line, package) for every import of a part of moec."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        for name in _imported_names(node, path):
            parts = name.split(".")
            if parts[0] == "moec" and len(parts) > 1:
                yield node.lineno, parts[1]


def _imported_names(node: ast.AST, path: Path) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if not isinstance(node, ast.ImportFrom):
        return []
    base = _absolute(node, path)
    return [f"{base}.{alias.name}" for alias in node.names]


def _absolute(node: ast.ImportFrom, path: Path) -> str:
    if node.level == 0:
        return node.module or ""
    folder = ("moec", *path.relative_to(MOEC).parts[:-1])
    base = ".".join(folder[: len(folder) - node.level + 1])
    return f"{base}.{node.module}" if node.module else base


@pytest.mark.parametrize("path", MODULES, ids=lambda path: str(path.relative_to(MOEC)))
def test_imports_only_downward(path: Path) -> None:
    own = _package(path)
    assert own in LEVEL, f"moec/{own} has no place in the import order: add it to TIERS"
    wrong = [
        f"line {line}: moec.{package}"
        for line, package in _imports(path)
        if package in LEVEL and LEVEL[package] > LEVEL[own]
    ]
    assert not wrong, f"{path.relative_to(MOEC)} imports upward: {wrong}"


def test_packages_have_no_cycles() -> None:
    edges: dict[str, set[str]] = {name: set() for name in LEVEL}
    for path in MODULES:
        edges[_package(path)] |= {package for _, package in _imports(path) if package in LEVEL}
    done: set[str] = set()
    while ready := {n for n in LEVEL if n not in done and edges[n] - {n} <= done}:
        done |= ready
    assert done == set(LEVEL), f"import cycle among {sorted(set(LEVEL) - done)}"


def test_relative_imports_are_resolved() -> None:
    path = MOEC / "cli" / "build.py"
    node = ast.parse("from ..runtime import load").body[0]
    assert _imported_names(node, path) == ["moec.runtime.load"]
