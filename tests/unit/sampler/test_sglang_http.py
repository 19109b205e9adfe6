"""Calls to a server, whatever it does to the connections."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress

import pytest

from tinsmith_sampler.sglang.http import Cut, Http

ANSWER = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


async def one_request(reader):
    head = await reader.readuntil(b"\r\n\r\n")
    await reader.readexactly(int(head.lower().split(b"content-length:")[1].split()[0]))


@asynccontextmanager
async def closing_server():
    """Answers as if a connection could be used again, and closes it at the next request on it."""

    serving = set()

    async def serve(reader, writer):
        serving.add(asyncio.current_task())
        with suppress(asyncio.IncompleteReadError):
            await one_request(reader)
            writer.write(ANSWER)
            await one_request(reader)
        writer.close()
        with suppress(ConnectionError):
            await writer.wait_closed()

    async with await asyncio.start_server(serve, "127.0.0.1") as server:
        yield f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        await asyncio.gather(*serving)


async def test_a_call_is_not_lost_on_a_connection_that_the_server_is_closing():
    async with closing_server() as url:
        http = Http(url)
        try:
            for _ in range(3):
                assert await http.post("/pause_generation", {}, timeout_s=60) == b"{}"
        finally:
            await http.close()


STREAM = b"data: " + bytes(range(97, 123)) * 40 + b"\n\ndata: a\nb\n\n\n\n\ndata: [DONE]\n\ncut"


@pytest.mark.parametrize("size", [1, 2, 3, 7, 500, len(STREAM)])
def test_events_are_the_same_wherever_their_bytes_are_cut(size):
    cut = Cut()
    found = [
        event
        for start in range(0, len(STREAM), size)
        for event in cut.add(STREAM[start : start + size])
    ]

    assert found == STREAM.split(b"\n\n")[:-1]


def test_a_byte_of_an_event_is_looked_at_once():
    """Else a large one, in many chunks, takes the square of its size."""
    cut, looked = Cut(), []

    class Counted(bytearray):
        def find(self, what, start):
            looked.append(len(self) - start)
            return super().find(what, start)

        def __iadd__(self, more):
            self.extend(more)
            return self

    cut._rest = Counted()
    for _ in range(1000):
        assert cut.add(b"12345678") == []
    assert cut.add(b"\n\n") == [b"12345678" * 1000]
    assert sum(looked) <= 8000 + 2 + 1002  # the last byte before each chunk once more
