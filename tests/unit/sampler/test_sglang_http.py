"""Calls to a server, whatever it does to the connections."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

from tinsmith_sampler.sglang.http import Http

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


async def one_request(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))


@asynccontextmanager
async def closing_server():
    """Answers as if a connection could be used again, and closes it at the next request on it."""

    async def serve(reader, writer):
        with suppress(asyncio.IncompleteReadError):
            await one_request(reader)
            writer.write(ANSWER)
            await one_request(reader)
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"


async def test_a_call_is_not_lost_on_a_connection_that_the_server_is_closing():
    async with closing_server() as url:
        http = Http(url)
        try:
            for _ in range(3):
                assert await http.post("/pause_generation", {}, timeout_s=60) == b"{}"
        finally:
            await http.close()
