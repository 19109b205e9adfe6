"""Request bodies: read within limits, decompressed within limits, decoded.

aiohttp's own decompression is switched off: its limit is on what arrives, not on what that
becomes.
"""

from __future__ import annotations

import asyncio
import sys
import zlib
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar

from aiohttp import web

from tinsmith.errors import InvalidRequest, TooLarge
from tinsmith_gateway.gateway import GATEWAY
from tinsmith_gateway.wire import requests
from tinsmith_gateway.wire.results import JSON

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinsmith_gateway.config import GatewayConfig

T = TypeVar("T")

EDGE_BYTES = 512  # of a body that is too large: enough to tell whose it is
STALL_S = 60.0  # between two parts of a body; the client itself gives up sooner
THREAD_BYTES = 1 << 20  # work on more than this is done beside the event loop


class _Decoder(Protocol):
    @property
    def eof(self) -> bool: ...
    @property
    def unused_data(self) -> bytes: ...
    def decompress(self, data: bytes, max_length: int, /) -> bytes: ...


class UnsupportedBody(InvalidRequest):
    """The content type or coding is not one that the endpoint takes (415)."""


class BodyTooLarge(TooLarge):
    """A body over a limit; ``prefix`` is how it begins, ``last`` the last that was read of it."""

    def __init__(self, message: str, prefix: bytes, last: bytes = b"") -> None:
        super().__init__(message)
        self.prefix = prefix
        self.last = last


class Limits(NamedTuple):
    """How large a body may be as it arrives, and decompressed; and what sets that."""

    received: int
    inflated: int
    setting: str

    def exceeded(self, limit: str, prefix: bytes, last: bytes = b"") -> BodyTooLarge:
        """The error of a body that is larger."""
        return BodyTooLarge(
            f"request body: over the limit of {limit}; send fewer or shorter items per request, "
            f"or raise {self.setting}",
            prefix,
            last,
        )


async def read_json(request: web.Request, type_: type[T]) -> T:
    """A JSON body as ``type_``; see ``read`` for errors, and InvalidRequest."""
    return requests.decode(await read(request, JSON), type_)


async def read(request: web.Request, *content_types: str) -> bytes:
    """The whole body, decompressed.

    Raises:
        UnsupportedBody: none of ``content_types``, or an unknown compression.
        BodyTooLarge: over the limits of its content type.
        InvalidRequest: it broke off, or cannot be decompressed.
    """
    if request.content_type not in content_types:
        raise UnsupportedBody(
            f"Content-Type: {request.content_type!r} is not what {request.path} takes; "
            f"send {' or '.join(content_types)}"
        )
    coding = request.headers.get("Content-Encoding", "identity").lower()
    if coding not in ("identity", *_DECODERS):
        raise UnsupportedBody(
            f"Content-Encoding: {coding!r} is unknown; send zstd, gzip or identity"
        )
    limits = _limits(request.app[GATEWAY].config, request.content_type)
    raw = await _receive(request, coding, limits)
    if coding == "identity":
        return raw
    return await asyncio.to_thread(inflate, raw, coding, limits)


def _limits(config: GatewayConfig, content_type: str) -> Limits:
    if content_type == JSON:
        return Limits(config.max_json_bytes, config.max_json_bytes, "gateway.max_json_bytes")
    return Limits(
        config.max_body_bytes,
        config.max_inflated_bytes,
        "gateway.max_body_bytes and gateway.max_inflated_bytes",
    )


async def _receive(request: web.Request, coding: str, limits: Limits) -> bytes:
    parts: list[bytes] = []
    size = 0
    try:
        while part := await _next_part(request, size):
            parts.append(part)
            size += len(part)
            if size > limits.received:
                prefix = _prefix(b"".join(parts), coding)
                last = b"".join(parts[-2:])[-EDGE_BYTES:] if coding == "identity" else b""
                raise limits.exceeded(f"{limits.received} bytes", prefix, last)
    except (ConnectionError, web.RequestPayloadError) as error:
        raise InvalidRequest(f"request body: broken off after {size} bytes") from error
    return b"".join(parts)


async def end_of(request: web.Request, error: BodyTooLarge) -> bytes:
    """The last bytes of a body that is too large, which is read and dropped up to a limit."""
    last, left = error.last, request.app[GATEWAY].config.max_body_bytes
    try:
        while left > 0 and (part := await _next_part(request, 0)):
            last = (last + part)[-EDGE_BYTES:]
            left -= len(part)
    except (ConnectionError, web.RequestPayloadError, InvalidRequest):
        return b""  # broken off: it has no end
    return last


async def _next_part(request: web.Request, size: int) -> bytes:
    """What has arrived meanwhile; nothing at the end."""
    try:
        async with asyncio.timeout(STALL_S):
            return await request.content.readany()
    except TimeoutError:
        raise InvalidRequest(
            f"request body: nothing has come for {STALL_S:g} s, after {size} bytes; send all of "
            "what Content-Length promises"
        ) from None


def inflate(raw: bytes, coding: str, limits: Limits) -> bytes:
    """``raw`` decompressed; never holds more than ``limits`` allow."""
    decoder = _DECODERS[coding]()
    try:
        data = decoder.decompress(raw, limits.inflated + 1)
    except (zlib.error, zstd.ZstdError) as error:
        raise InvalidRequest(f"request body: not valid {coding} ({error})") from error
    if len(data) > limits.inflated:
        raise limits.exceeded(f"{limits.inflated} bytes once decompressed", data[:EDGE_BYTES])
    if not decoder.eof or decoder.unused_data:
        raise InvalidRequest(f"request body: not exactly one complete {coding} stream")
    return data


def _prefix(raw: bytes, coding: str) -> bytes:
    if coding == "identity":
        return raw[:EDGE_BYTES]
    try:
        return _DECODERS[coding]().decompress(raw, EDGE_BYTES)
    except (zlib.error, zstd.ZstdError):
        return b""  # what cannot be read tells nobody's name


_DECODERS: dict[str, Callable[[], _Decoder]] = {
    "zstd": zstd.ZstdDecompressor,
    "gzip": lambda: zlib.decompressobj(16 + zlib.MAX_WBITS),
}
