"""The one error type that a user of moec is meant to read."""

from __future__ import annotations


class MoecError(Exception):
    """A mistake or a limit that the user can do something about; the CLI prints it and exits with code 2.

    Args:
        what: What is wrong, one sentence.
        where: The file, layer or tensor it is about.
        hint: What to do next.
    """

    def __init__(self, what: str, *, where: str | None = None, hint: str | None = None) -> None:
        super().__init__(what)
        self.what, self.where, self.hint = what, where, hint

    def __str__(self) -> str:
        where = f" ({self.where})" if self.where else ""
        hint = f"\n  {self.hint}" if self.hint else ""
        return f"{self.what}{where}{hint}"
