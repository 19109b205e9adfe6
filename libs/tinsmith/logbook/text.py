"""Text from a log on a terminal: names and messages in it are their senders', not ours."""

from __future__ import annotations

MAX_CHARS = 200
SHORT_DIGEST = 8


def plain(value: object, limit: int = MAX_CHARS) -> str:
    """``value`` as one line that cannot steer a terminal, cut after ``limit`` characters."""
    text = str(value)
    cut = text if len(text) <= limit else text[: limit - 3] + "..."
    return "".join(char if char.isprintable() else f"\\u{ord(char):04x}" for char in cut)


def short(digest: str) -> str:
    """Enough of a digest to tell it from others; ``-`` for none."""
    return plain(digest[:SHORT_DIGEST]) or "-"


def size(count: float) -> str:
    """Bytes in the unit that fits."""
    for unit in ("bytes", "kB", "MB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} GB"
