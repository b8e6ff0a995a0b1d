"""The tables of docs/kv-cache.md against the layouts; its examples run in test_commands.py and here."""

from __future__ import annotations

import re

import pytest

from moec.reference.kv_layout import KVLayout
from tests.docs.blocks import REPO, blocks

DOCUMENT = REPO / "docs" / "kv-cache.md"


def tables() -> list[list[list[str]]]:
    """Cells of every table, header first."""
    found = re.findall(r"(?:^\|.*\|\n)+", DOCUMENT.read_text(encoding="utf-8"), re.MULTILINE)
    rows = [[[cell.strip() for cell in line[1:-1].split("|")] for line in t.splitlines()] for t in found]
    return [[table[0], *table[2:]] for table in rows]


def table(*header: str) -> list[list[str]]:
    """Rows of the table that starts with these columns."""
    return next(t[1:] for t in tables() if tuple(t[0][: len(header)]) == header)


def test_byte_offsets():
    rows = table("head size", "P", "g")
    assert [int(row[0]) for row in rows] == [64, 80, 96, 128, 192, 256]
    for row in rows:
        layout = KVLayout("mkv2", 1, int(row[0]), int(row[0]), 4096)
        offsets = list(layout.offsets.values())
        want = [layout.k_dim, layout.promoted, layout.v_group, *offsets, layout.block_bytes]
        assert [int(cell) for cell in row[:-1]] == want
        assert row[-1] == f"{layout.bits_per_element:.3f}"


def test_sections_in_order():
    names = [row[0].strip("`") for row in table("section")]
    assert names == list(KVLayout("mkv2", 1, 64, 64, 4096).sections)


def test_bytes_and_bits_of_every_format():
    formats = ("mkv2", "mkv2_lean", "k4v2", "int8")
    for row in table("head size", *formats):
        for format, cell in zip(formats, row[1:], strict=True):
            layout = KVLayout(format, 1, int(row[0]), int(row[0]), 4096)
            assert cell == f"{layout.block_bytes}, {layout.bits_per_element:.3f}"


@pytest.mark.parametrize("head_size", [64, 128])
def test_bits_of_whole_allocations(head_size):
    formats = ("mkv2", "mkv2_lean", "k4v2", "int8")
    for row in table("context", *formats):
        for format, cell in zip(formats, row[1:], strict=True):
            layout = KVLayout(format, 3, head_size, head_size, int(row[0]))
            assert cell == f"{layout.bits_per_element_allocated:.2f}"


@pytest.mark.parametrize("example", [b for b in blocks("python") if b.document == DOCUMENT], ids=str)
def test_examples_hold(example):
    exec(compile(example.text, str(example), "exec"), {})
