"""A small HTTP listener for pages about the process itself.

It runs on the service's event loop on purpose: while that is blocked, a probe of ``/healthz`` gets
no answer. It reads a request line and headers, answers, and closes; it has no use for more.
"""

from __future__ import annotations

import asyncio
import contextlib
from contextlib import asynccontextmanager
from http import HTTPStatus
from typing import TYPE_CHECKING, NamedTuple

from tinsmith import listening

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

MAX_REQUEST_BYTES = 16 << 10
MAX_CONNECTIONS = 64  # more are closed unanswered: nobody asks so often
PATIENCE_S = 10.0  # to send a request, and to read the answer


class Page(NamedTuple):
    """An answer."""

    body: bytes
    content_type: str = "application/json"
    status: int = 200


@asynccontextmanager
async def serving(
    host: str, port: int, pages: Mapping[str, Callable[[], Page]]
) -> AsyncIterator[str]:
    """Answer GET for ``pages``, by path, inside the block; gives the address as a URL.

    Raises:
        StartupError: the address cannot be listened on.
    """
    address = listening.bind(host, port, section="metrics")
    url = listening.url_of(address, host)
    running: set[asyncio.Task[None]] = set()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        if task is None or len(running) >= MAX_CONNECTIONS:
            writer.close()
            return
        running.add(task)
        try:
            await _serve(reader, writer, pages)
        finally:
            running.discard(task)
            writer.close()

    server = await asyncio.start_server(connected, sock=address, limit=MAX_REQUEST_BYTES)
    try:
        yield url
    finally:
        server.close()
        for task in running:
            task.cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def _serve(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    pages: Mapping[str, Callable[[], Page]],
) -> None:
    # Whoever goes away, is too slow or sends too much is not answered.
    gone = (TimeoutError, OSError, asyncio.IncompleteReadError, asyncio.LimitOverrunError)
    with contextlib.suppress(*gone):
        async with asyncio.timeout(PATIENCE_S):
            head = await reader.readuntil(b"\r\n\r\n")
            page, is_head = _answer(head, pages)
            writer.write(_encoded(page, is_head=is_head))
            await writer.drain()


def _answer(head: bytes, pages: Mapping[str, Callable[[], Page]]) -> tuple[Page, bool]:
    method, _, rest = head.partition(b"\r\n")[0].decode("latin-1").partition(" ")
    path = rest.partition(" ")[0].partition("?")[0]
    if method not in ("GET", "HEAD"):
        return Page(b'{"detail":"only GET is answered here"}', status=405), False
    page = pages.get(path, lambda: _not_found(pages))
    return page(), method == "HEAD"


def _not_found(pages: Mapping[str, Callable[[], Page]]) -> Page:
    known = ", ".join(pages)
    return Page(f'{{"detail":"there is no such page; there are {known}"}}'.encode(), status=404)


def _encoded(page: Page, *, is_head: bool) -> bytes:
    lines = (
        f"HTTP/1.1 {page.status} {HTTPStatus(page.status).phrase}",
        f"Content-Type: {page.content_type}",
        f"Content-Length: {len(page.body)}",
        "Cache-Control: no-store",
        "Connection: close",
    )
    head = "".join(f"{line}\r\n" for line in lines) + "\r\n"
    return head.encode() + (b"" if is_head else page.body)
