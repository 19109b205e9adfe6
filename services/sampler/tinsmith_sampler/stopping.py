"""When a row ends: its last token, its stop tokens, its stop strings.

The token that completes a stop string is kept, so the text of the returned tokens holds the
string once, at its end. If that token carries characters beyond the string they stay, since a
token cannot be cut: the row ends at the first token at which the string is there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from tinsmith_sampler.engine import StopReason

    Decode = Callable[[list[int]], str]

_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
"""What a decoder gives for the first bytes of a character whose last bytes are still to come."""


class StopText:
    """Watches the text of a growing row for any of the stop strings.

    The text is decoded a few tokens at a time. The window begins one finished stretch early,
    because some decoders treat the first token of a text differently from the others.
    """

    def __init__(self, strings: Sequence[str], decode: Decode) -> None:
        self._strings = strings
        self._decode = decode
        self._keep = max(map(len, strings)) - 1  # a string may begin this far back
        self._window: list[int] = []
        self._done = 0  # tokens at the window's start whose text is in the tail
        self._tail = ""

    def ends_with(self, token: int) -> bool:
        """Append ``token``; whether a stop string is now in the text."""
        self._window.append(token)
        text = self._decode(self._window)
        seen = self._decode(self._window[: self._done]) if self._done else ""
        recent = self._tail + text[len(seen) :]
        if any(string in recent for string in self._strings):
            return True
        if not text.endswith(_UNFINISHED):
            self._tail = recent[len(recent) - self._keep :] if self._keep < len(recent) else recent
            self._window = self._window[self._done :]
            self._done = len(self._window)
        return False


class Stopper:
    """The end of one row, asked after every token."""

    def __init__(
        self, *, max_tokens: int, stop_tokens: frozenset[int], text: StopText | None
    ) -> None:
        self._left = max_tokens
        self._stop_tokens = stop_tokens
        self._text = text

    def after(self, token: int) -> StopReason | None:
        """Why the row ends with ``token``; None when it goes on."""
        self._left -= 1
        if token in self._stop_tokens:
            return "stop"
        if self._text is not None and self._text.ends_with(token):
            return "stop"
        return "length" if self._left == 0 else None
