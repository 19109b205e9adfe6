"""The log of ``tinsmith up``: the output of many processes as one stream of lines."""

from __future__ import annotations

import asyncio
import json
import os
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

MAX_LINE_BYTES = 1 << 20  # a longer one is broken in pieces
_COLORS = (36, 32, 35, 34, 33, 96, 92, 95)  # ANSI foreground


class LogStream:
    """Writes lines that say which process they come from."""

    def __init__(
        self, stream: TextIO, labels: Iterable[str], *, is_json: bool, has_colors: bool
    ) -> None:
        """With ``is_json`` every line is one JSON object; labels are then the key ``service``."""
        self._stream = stream
        self._is_json = is_json
        labels = tuple(labels)
        width = max(map(len, labels))
        self._prefixes = {
            label: _prefix(label.ljust(width), _COLORS[n % len(_COLORS)] if has_colors else None)
            for n, label in enumerate(labels)
        }

    def write(self, label: str, line: str) -> None:
        """One line of ``label``'s output."""
        self._stream.write(self._formatted(label, line) + "\n")
        self._stream.flush()

    def _formatted(self, label: str, line: str) -> str:
        if not self._is_json:
            return self._prefixes[label] + line
        if line.startswith("{"):  # a service's own log line, which names the service
            return line
        return json.dumps({"service": label, "event": line})


def _prefix(label: str, color: int | None) -> str:
    return f"{label} | " if color is None else f"\x1b[{color}m{label} |\x1b[0m "


async def lines(fd: int) -> AsyncIterator[str]:
    """The lines that arrive at a pipe until its last writer has gone; closes ``fd``."""
    reader = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), os.fdopen(fd, "rb", 0)
    )
    try:
        while line := await _next(reader):
            yield line.decode(errors="replace").rstrip("\r\n")
    finally:
        transport.close()


async def _next(reader: asyncio.StreamReader) -> bytes:
    try:
        return await reader.readuntil()
    except asyncio.IncompleteReadError as error:
        return error.partial
    except asyncio.LimitOverrunError as error:
        return await reader.read(error.consumed)
