"""Tokens of some minutes that clients get for their key, and then present in its place.

A token names the key by its digest, so that it ends with the key. All gateways sign with one
secret, made by the first of them and kept in the registry.
"""

from __future__ import annotations

import secrets
import time
from typing import TYPE_CHECKING

import jwt

from tinsmith.errors import Unauthorized
from tinsmith.messages.registry import Secret
from tinsmith.messages.table import SECRETS

if TYPE_CHECKING:
    from tinsmith.bus import Bus
    from tinsmith_gateway.auth import Caller

_KEY = "tokens"
_ALGORITHM = "HS256"
_AUDIENCE = "tinsmith"
_LEEWAY_S = 5  # the gateways' clocks may differ by so much


class InvalidToken(Unauthorized):
    """A token that is not, or no longer, good: clients exchange their key anew and go on."""


class Tokens:
    """Makes and reads tokens."""

    def __init__(self, bus: Bus, lifetime_s: float) -> None:
        self._table = bus.table(SECRETS)
        self._lifetime_s = lifetime_s
        self._secret = b""

    async def start(self) -> None:
        """Finds or makes the secret. Raises BrokerUnavailable."""
        made = Secret(key=secrets.token_bytes(32))
        self._secret = (await self._table.create(_KEY, made)).key

    def issue(self, caller: Caller) -> str:
        """A token that stands for the caller's key."""
        now_s = int(time.time())
        claims = {
            "aud": _AUDIENCE,
            "sub": caller.owner,
            "org_id": "tinsmith",
            "email": "",
            "key": caller.key_digest,
            "iat": now_s,
            "exp": now_s + int(self._lifetime_s),
        }
        return jwt.encode(claims, self._secret, algorithm=_ALGORITHM)

    def key_digest(self, token: str) -> str:
        """The digest of the key that a token stands for; InvalidToken."""
        try:
            claims = jwt.decode(
                token,
                self._secret,
                algorithms=[_ALGORITHM],
                audience=_AUDIENCE,
                leeway=_LEEWAY_S,
                options={"require": ["exp", "iat", "sub"]},
            )
        except jwt.ExpiredSignatureError:
            raise InvalidToken(
                "X-API-Key: this token has expired; exchange the API key for another at "
                "/api/v1/auth/token, as clients do by themselves"
            ) from None
        except jwt.InvalidTokenError:
            raise InvalidToken(
                "X-API-Key: this token was not made by this server; exchange the API key for one "
                "at /api/v1/auth/token"
            ) from None
        return str(claims.get("key", ""))


def is_token(presented: str) -> bool:
    """Whether it is no key but a JWT: clients tell them apart by the same letters."""
    return presented.startswith("eyJ")
