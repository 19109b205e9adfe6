"""The text of one continuation as it grows: whole characters, and nothing of a stop string."""

from __future__ import annotations

import codecs
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinsmith.messages.texts import TokenPiece


class Token(NamedTuple):
    """A token that was drawn; log-probabilities are raw (temperature 1)."""

    piece: TokenPiece
    logprob: float
    top: tuple[tuple[TokenPiece, float], ...] = ()  # the likeliest in its place, best first


class Stretch(NamedTuple):
    """What comes next: text, and the tokens that begin in it with where they do so."""

    text: str
    tokens: list[tuple[int, Token]]  # the first: characters from the beginning of the passage


class Passage:
    """Takes tokens and gives out text, which is the same however it is asked for.

    What may be the beginning of a stop string, or of a character, is kept until that is known.
    The text ends before the first stop string; tokens that begin behind its end, as the mark that
    ends a message does, are not given out.
    """

    def __init__(self, stops: Iterable[str] = ()) -> None:
        self._stops = tuple(stops)
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._given = 0  # characters
        self._held = ""
        self._tokens: list[tuple[int, Token]] = []  # held as well
        self._is_over = False

    def add(self, token: Token) -> None:
        """One more token."""
        if self._is_over:
            return
        self._tokens.append((self._given + len(self._held), token))
        if not token.piece.is_special:
            self._grow(self._decoder.decode(token.piece.text))

    def release(self, *, is_end: bool = False) -> Stretch:
        """What can be given out now; with ``is_end`` all that is left."""
        if is_end and not self._is_over:
            self._grow(self._decoder.decode(b"", final=True))
            self._is_over = True
        kept = (
            0 if self._is_over else max((_overlap(self._held, s) for s in self._stops), default=0)
        )
        text, self._held = _cut(self._held, len(self._held) - kept)
        self._given += len(text)
        tokens = [one for one in self._tokens if one[0] < self._given]
        self._tokens = self._tokens[len(tokens) :]
        return Stretch(text, tokens)

    def _grow(self, text: str) -> None:
        self._held += text
        ends = [end for stop in self._stops if (end := self._held.find(stop)) >= 0]
        if ends:
            self._held = self._held[: min(ends)]
            self._is_over = True


def _overlap(text: str, stop: str) -> int:
    """How much of the end of ``text`` is the beginning of ``stop``."""
    longest = min(len(text), len(stop) - 1)
    return next((n for n in range(longest, 0, -1) if text.endswith(stop[:n])), 0)


def _cut(text: str, place: int) -> tuple[str, str]:
    return text[:place], text[place:]
