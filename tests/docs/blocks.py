"""Fenced blocks of the README and docs/ that readers are meant to type."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

REPO = Path(__file__).parents[2]
DOCUMENTS = (REPO / "README.md", *sorted((REPO / "docs").glob("*.md")))
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@dataclass(frozen=True)
class Block:
    """One fenced block; `language` is the word after the fence."""

    document: Path
    number: int
    language: str
    text: str

    @property
    def commands(self) -> list[str]:
        """Shell commands: every line of ```sh, the lines after "$ " of ```console."""
        lines = self.text.replace("\\\n", " ").splitlines()
        if self.language == "console":
            return [line[2:] for line in lines if line.startswith("$ ")]
        return [line for line in lines if line.strip() and not line.startswith("#")]

    def __str__(self) -> str:
        return f"{self.document.stem}-{self.number}"


def blocks(*languages: str) -> list[Block]:
    """All blocks in one of the languages, in reading order."""
    found = []
    for document in DOCUMENTS:
        text = document.read_text(encoding="utf-8")
        for number, (language, body) in enumerate(FENCE.findall(text)):
            if language in languages:
                found.append(Block(document, number, language, body))
    return found
