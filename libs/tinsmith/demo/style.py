"""The style that the demo teaches, as a check that a program can make.

Telegrams were paid by the word and had no punctuation; STOP ended a sentence.
"""

from __future__ import annotations

import re

STOP = "STOP"
MIN_WORDS, MAX_WORDS = 3, 12  # with STOP
_WORD = re.compile(r"[A-Za-z0-9]+(?:['-][A-Za-z0-9]+)*")


def is_telegram(text: str) -> bool:
    """Whether ``text`` is 3 to 12 words without punctuation, the last and no other being STOP."""
    *words, last = text.strip().split(" ")
    return (
        last == STOP
        and STOP not in words
        and MIN_WORDS <= len(words) + 1 <= MAX_WORDS
        and all(_WORD.fullmatch(word) for word in words)
    )
