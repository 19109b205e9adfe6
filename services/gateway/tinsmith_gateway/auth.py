"""API keys: which are valid, and the owner id that stands for each everywhere else."""

from __future__ import annotations

import hashlib
import hmac
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith.errors import ConfigError, InvalidRequest, StartupError, Unauthorized

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinsmith_gateway.config import GatewayConfig

PREFIX = "tml-"  # the client refuses any other key before it sends anything


class Keyring:
    """The valid keys as digests, and their owners."""

    def __init__(self, keys: Iterable[str]) -> None:
        self._owners = {_digest(key): owner_of(key) for key in keys}

    def owner(self, presented: str | None) -> str:
        """The owner id behind a key that a request presents; Unauthorized when it has none."""
        if not presented:
            raise Unauthorized("X-API-Key: missing; set TINKER_API_KEY to a key of this server")
        digest = _digest(presented)
        found = ""
        # Every key is compared, in constant time: the time taken tells nothing about any of them.
        for known, owner in self._owners.items():
            if hmac.compare_digest(known, digest):
                found = owner
        if not found:
            raise Unauthorized(
                "X-API-Key: not a key of this server, or no longer; "
                "ask its operator for one and set TINKER_API_KEY"
            )
        return found


def token_owner(keys: Keyring, token: str | None) -> str | None:
    """The owner whose things a ``weights_access_token``, which is an API key, gives access to."""
    if token is None:
        return None
    try:
        return keys.owner(token)
    except Unauthorized:
        raise InvalidRequest(
            "weights_access_token: not a key of this server; pass the API key of the owner, or "
            "ask for the checkpoint to be published"
        ) from None


def owner_of(key: str) -> str:
    """A short id that names a key without giving it away."""
    return hashlib.sha256(b"tinsmith owner\0" + key.encode()).hexdigest()[:16]


def read_keys(config: GatewayConfig, default_file: Path) -> tuple[str, ...]:
    """The configured keys, or those in ``default_file`` when none is configured.

    Raises:
        ConfigError: a key that no client could send, or a key file that cannot be read.
        StartupError: no key at all.
    """
    keys = [*_checked(config.api_keys, "gateway.api_keys")]
    if config.api_key_file:
        keys += _from_file(Path(config.api_key_file).expanduser())
    elif not keys and default_file.exists():
        keys += _from_file(default_file)
    if not keys:
        raise StartupError(
            f"gateway: there is no API key; set gateway.api_keys or gateway.api_key_file "
            f"(by default {default_file} is read, but it does not exist)"
        )
    return tuple(keys)


def _from_file(path: Path) -> list[str]:
    try:
        lines = path.read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"gateway.api_key_file: {path} cannot be read ({error}); it holds one key a line"
        ) from error
    return _checked(
        (stripped for line in lines if (stripped := line.partition("#")[0].strip())), str(path)
    )


def _checked(keys: Iterable[str], where: str) -> list[str]:
    checked = list(keys)
    for index, key in enumerate(checked):
        # The message says which key, never what it is.
        if not key.startswith(PREFIX) or len(key) == len(PREFIX) or not key.isprintable():
            raise ConfigError(
                f"{where}: key number {index + 1} cannot be used; keys are printable and start "
                f"with {PREFIX!r}, as the client demands"
            )
    return checked


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode(errors="surrogateescape")).digest()
