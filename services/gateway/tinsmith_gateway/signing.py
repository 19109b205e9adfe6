"""Links that open one download for some time, to whoever has them, without a key.

All gateways sign with one secret, made by the first of them and kept in the registry.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from typing import TYPE_CHECKING, Literal

import msgspec

from tinsmith.errors import Gone, NotFound
from tinsmith.messages.registry import Secret
from tinsmith.messages.table import SECRETS

if TYPE_CHECKING:
    from tinsmith.bus import Bus

_KEY = "downloads"


class Ticket(msgspec.Struct, frozen=True, array_like=True):
    """What a link opens; ``subject`` is a checkpoint's path or a session's id."""

    kind: Literal["archive", "trace", "file"]
    subject: str
    expires_s: int  # unix time
    blake3: str = ""  # of the file, which may be replaced by another of its name


class Signer:
    """Makes and reads the texts that stand for tickets in links."""

    def __init__(self, bus: Bus) -> None:
        self._table = bus.table(SECRETS)
        self._secret = b""

    async def sign(self, ticket: Ticket) -> str:
        """The text for a link. Raises BrokerUnavailable."""
        body = msgspec.json.encode(ticket)
        return f"{_text(body)}.{_text(await self._digest(body))}"

    async def read(self, text: str) -> Ticket:
        """The ticket. Raises NotFound for what was not signed here, Gone after its time."""
        body, _, signature = text.partition(".")
        try:
            data, given = _bytes(body), _bytes(signature)
        except ValueError:
            data, given = b"", b""
        if not hmac.compare_digest(await self._digest(data), given):
            raise NotFound("this link was not made by this server; ask for a new one")
        ticket = msgspec.json.decode(data, type=Ticket)
        if ticket.expires_s <= time.time():
            raise Gone("this link has expired; ask for a new one")
        return ticket

    async def _digest(self, body: bytes) -> bytes:
        if not self._secret:
            made = Secret(key=secrets.token_bytes(32))
            self._secret = (await self._table.create(_KEY, made)).key
        return hmac.digest(self._secret, body, hashlib.sha256)


def _text(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True)
