"""API keys: how they are made, the digest that stands for each, and whose they are."""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from typing import TYPE_CHECKING

from msgspec import structs

from tinsmith.errors import InvalidRequest

if TYPE_CHECKING:
    from tinsmith.messages.registry import ApiKey

PREFIX = "tml-"  # the client refuses any other key before it sends anything
RANDOM_BYTES = 24  # 192 bits
MIN_DIGITS = 8  # of a digest, to name a key
_OWNER_RE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.@-]{0,63}")


def new_key() -> str:
    """A key that nobody can guess; only its digest is ever stored."""
    return PREFIX + secrets.token_hex(RANDOM_BYTES)


def digest(key: str) -> str:
    """SHA-256 in hex: enough for keys that are random, unlike passwords."""
    return hashlib.sha256(key.encode(errors="surrogateescape")).hexdigest()


def owner_of_key(key: str) -> str:
    """The owner id of a configured key, which has no name; it does not give the key away."""
    return hashlib.sha256(b"tinsmith owner\0" + key.encode()).hexdigest()[:16]


def owner_of_name(name: str) -> str:
    """The owner id of all keys made for ``name``: hex digits, so that it can be in a subject."""
    return hashlib.sha256(b"tinsmith owner name\0" + name.encode()).hexdigest()[:32]


def check_owner(name: str) -> str:
    """``name`` itself when it can name an owner; InvalidRequest otherwise."""
    if _OWNER_RE.fullmatch(name) is None:
        raise InvalidRequest(
            f"owner: {name[:80]!r} cannot name an owner; use 1 to 64 letters, digits or '_.@-', "
            "starting with a letter or digit"
        )
    return name


def revoked(entry: ApiKey | None) -> ApiKey | None:
    """A key that ends now, for ``Table.update``: None when there is nothing to end."""
    if entry is None or entry.revoked_ns is not None:
        return None
    return structs.replace(entry, revoked_ns=time.time_ns())
