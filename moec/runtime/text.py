"""From token ids to text that can be shown: whole characters only, and nothing of a stop string."""

from __future__ import annotations

from collections.abc import Callable, Sequence

REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are not (yet) a character
_CONTEXT = 8  # tokens before the first one that its text may depend on
_MAX_PENDING = 16  # tokens; a character has at most four bytes, so more is no character in the making


class StreamDecoder:
    """Turns tokens into text piece by piece; the pieces joined are the text of all tokens.

    A token may end inside a UTF-8 character, and its text may depend on the token before it (a leading
    space). So every piece is the difference of two decoded windows that start at the same earlier token, and
    nothing is given out while the window ends in an unfinished character.

    Args:
        decode: Token ids to text, special tokens left out.
        context: Tokens before the first one (the prompt).
    """

    def __init__(self, decode: Callable[[list[int]], str], context: Sequence[int] = ()) -> None:
        self._decode = decode
        self._window = list(context[-_CONTEXT:])
        self._before = self._text()
        while self._before.startswith(REPLACEMENT):  # the cut went through a character
            del self._window[0]
            self._before = self._text()
        self._shown = len(self._window)  # tokens of the window whose text is `_before`

    def push(self, token: int) -> str:
        """The text that became certain with this token, often one word, possibly empty."""
        self._window.append(token)
        text = self._text()
        unfinished = text.endswith(REPLACEMENT) and len(self._window) - self._shown < _MAX_PENDING
        return "" if unfinished else self._advance(text)

    def flush(self) -> str:
        """The rest at the end of a stream; an unfinished character comes out as U+FFFD."""
        return self._advance(self._text())

    def _text(self) -> str:
        return self._decode(self._window) if self._window else ""

    def _advance(self, text: str) -> str:
        piece = text[len(self._before) :]
        if piece:  # a special token has no text: the next window cannot start from it
            self._window = self._window[self._shown :]
            self._shown, self._before = len(self._window), self._text()
        return piece


class StopMatcher:
    """Cuts a stream of text before the first stop string, holding back what may become one."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stop for stop in stops if stop)
        self._held = ""

    def push(self, text: str) -> tuple[str, bool]:
        """Adds text; returns (text that is safe to show, whether a stop string was met)."""
        self._held += text
        found = [at for at in (self._held.find(stop) for stop in self._stops) if at >= 0]
        if found:
            shown, self._held = self._held[: min(found)], ""
            return shown, True
        keep = max((_overlap(self._held, stop) for stop in self._stops), default=0)
        shown = self._held[: len(self._held) - keep]
        self._held = self._held[len(shown) :]
        return shown, False

    def flush(self) -> str:
        """The held-back text, when the stream ended otherwise."""
        text, self._held = self._held, ""
        return text


def _overlap(text: str, stop: str) -> int:
    """Length of the longest end of `text` that is a proper beginning of `stop`."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)
