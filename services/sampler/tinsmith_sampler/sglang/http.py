"""Calls to one SGLang server: JSON over HTTP, every one bounded, every failure typed."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

import aiohttp
import msgspec

from tinsmith_sampler.sglang.failures import SglangGone, SglangRefused

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Mapping

T = TypeVar("T")

CONNECT_S = 10.0
_DONE = b"[DONE]"
_END = b"\n\n"  # of an event


class Http:
    """A session with one server. It is opened by the first call, in the loop that makes it."""

    def __init__(self, url: str, key: str = "") -> None:
        """``key`` is the server's ``--api-key``; empty: it has none."""
        self._url = url.rstrip("/")
        self._headers = {"Content-Type": "application/json"}
        if key:
            self._headers["Authorization"] = f"Bearer {key}"
        self._session: aiohttp.ClientSession | None = None
        self._open: set[aiohttp.ClientResponse] = set()
        self._is_closed = False

    async def get(self, path: str, *, timeout_s: float) -> bytes:
        """The body of what it answers."""
        async with self._call("GET", path, None, timeout_s) as answer:
            return await answer.read()

    async def post(
        self,
        path: str,
        body: object,
        *,
        timeout_s: float,
        params: Mapping[str, str] | None = None,
    ) -> bytes:
        """The body of what it answers."""
        async with self._call("POST", path, body, timeout_s, params) as answer:
            return await answer.read()

    async def events(
        self, path: str, body: object, *, timeout_s: float
    ) -> AsyncGenerator[bytes, None]:
        """The data of each event of a stream, up to its regular end."""
        async with self._call("POST", path, body, timeout_s) as answer:
            cut = Cut()
            async for chunk in answer.content.iter_any():
                for event in cut.add(chunk):
                    data = event.removeprefix(b"data: ")
                    if data == _DONE:
                        return
                    yield data
        raise SglangGone("the server broke off a stream")

    async def close(self) -> None:
        """Drop its connections; calls that are under way, and later ones, are SglangGone."""
        self._is_closed = True
        for answer in self._open:  # a session that is closed would leave their readers waiting
            answer.content.set_exception(SglangGone("its client was closed"))
        if self._session is not None:
            await self._session.close()

    @asynccontextmanager
    async def _call(
        self,
        method: str,
        path: str,
        body: object,
        timeout_s: float,
        params: Mapping[str, str] | None = None,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        if self._is_closed:
            raise SglangGone("its client was closed")
        if self._session is None:
            # No limit of connections: each row of a batch holds one. And none is used twice: the
            # server closes those that are idle, perhaps just when the next call is on its way.
            connector = aiohttp.TCPConnector(limit=0, force_close=True)
            self._session = aiohttp.ClientSession(connector=connector, headers=self._headers)
        limits = aiohttp.ClientTimeout(total=timeout_s, sock_connect=CONNECT_S)
        data = None if body is None else msgspec.json.encode(body)
        try:
            async with self._session.request(
                method, self._url + path, data=data, params=params, timeout=limits
            ) as answer:
                self._open.add(answer)
                try:
                    await _check(answer)
                    yield answer
                finally:
                    self._open.discard(answer)
        except TimeoutError as error:
            raise SglangGone(f"no answer to {path} within {timeout_s:g} s") from error
        except (aiohttp.ClientError, OSError) as error:
            raise SglangGone(f"{path}: {str(error) or type(error).__name__}") from error


class Cut:
    """Events out of the chunks in which they come, each byte looked at once."""

    def __init__(self) -> None:
        self._rest = bytearray()  # of an event whose end is not there

    def add(self, chunk: bytes) -> list[bytes]:
        """The events that end in ``chunk``, without their separators."""
        events, start = [], 0
        # The rest has no separator in it, but may end in half of one.
        seen = max(len(self._rest) - len(_END) + 1, 0)
        self._rest += chunk
        while (end := self._rest.find(_END, seen)) >= 0:
            events.append(bytes(self._rest[start:end]))
            start = seen = end + len(_END)
        del self._rest[:start]
        return events


def decoded(type_: type[T], data: bytes) -> T:
    """A body that the server answered; SglangGone when it is not what 0.5.23 says."""
    try:
        return msgspec.json.decode(data, type=type_)
    except msgspec.MsgspecError as error:
        raise SglangGone(f"an answer that 0.5.23 does not give: {error}") from error


async def _check(answer: aiohttp.ClientResponse) -> None:
    if answer.status < 400:
        return
    message = said(await answer.read())
    if answer.status < 500:
        raise SglangRefused(answer.status, message)
    raise SglangGone(f"{answer.url.path} failed in the server ({answer.status}): {message}")


def said(data: bytes) -> str:
    """The words of a refusal, wherever this endpoint puts them."""
    try:
        body: Any = msgspec.json.decode(data)
    except msgspec.DecodeError:
        return data.decode(errors="replace").strip()
    while isinstance(body, dict):
        for key in ("error", "error_message", "message", "detail"):
            if body.get(key):
                body = body[key]
                break
        else:
            return str(body)
    return str(body)
