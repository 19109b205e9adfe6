"""A network link that can be cut or made to swallow everything: a small TCP proxy."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit


class Link:
    """Made by ``Link.to``; clients connect to ``url``."""

    def __init__(self, target):
        self._target = target
        self._is_open = asyncio.Event()
        self._is_open.set()
        self._writers = set()
        self.url = ""

    @classmethod
    @asynccontextmanager
    async def to(cls, url):
        """A link to the server at ``url``, user and all."""
        parts = urlsplit(url)
        link = cls((parts.hostname, parts.port))
        server = await asyncio.start_server(link._accept, "127.0.0.1", 0)
        port = server.sockets[0].getsockname()[1]
        link.url = f"nats://{parts.username}@127.0.0.1:{port}"
        yield link
        server.close()
        link.heal()
        link.cut()

    def cut(self):
        """Break every connection; new ones work."""
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    def swallow(self):
        """Let nothing through, and keep connections open."""
        self._is_open.clear()

    def heal(self):
        """Let everything through again."""
        self._is_open.set()

    async def _accept(self, reader, writer):
        to_reader, to_writer = await asyncio.open_connection(*self._target)
        self._writers |= {writer, to_writer}
        with suppress(ConnectionError):
            await asyncio.gather(self._pass(reader, to_writer), self._pass(to_reader, writer))

    async def _pass(self, reader, writer):
        while data := await reader.read(65536):
            await self._is_open.wait()
            writer.write(data)
            await writer.drain()
        writer.close()
