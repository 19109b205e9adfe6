"""API keys: which are valid, and the owner id that stands for each everywhere else."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import structlog
from msgspec import structs

from tinsmith.errors import ConfigError, InvalidRequest, Unauthorized
from tinsmith.keys import PREFIX, digest, owner_of_key
from tinsmith_gateway.tokens import InvalidToken, is_token

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinsmith.bus.views import View
    from tinsmith.messages.registry import ApiKey
    from tinsmith_gateway.config import GatewayConfig
    from tinsmith_gateway.tokens import Tokens

log = structlog.get_logger(__name__)

LOCAL_KEY = "tml-local"
"""In open mode, valid, and taken for granted when a request has none."""


class Caller(NamedTuple):
    """Who makes a request."""

    owner: str  # the id
    key_digest: str
    name: str  # the owner's, where it has one, else the id
    project_id: str | None = None  # of sessions that name none
    is_by_token: bool = False  # the key was exchanged for what was presented


class Keyring:
    """The valid keys by their digests: those configured, and those in the registry.

    A look-up by digest needs no constant time: who measures it learns about digests, which lead
    back to no key.
    """

    def __init__(
        self,
        configured: Iterable[str],
        made: View[ApiKey],
        tokens: Tokens | None = None,
        *,
        is_open: bool = False,
    ) -> None:
        self._configured = {digest(key): owner_of_key(key) for key in configured}
        self._made = made
        self._tokens = tokens
        self._is_open = is_open
        if is_open:
            self._configured[digest(LOCAL_KEY)] = owner_of_key(LOCAL_KEY)

    def caller(self, presented: str | None, *, is_local: bool = False) -> Caller:
        """Who presents a key or a token; Unauthorized when it is not, or no longer, valid.

        ``is_local``: the request comes from this machine, for which open mode makes up a key.
        """
        if not presented and self._is_open and is_local:
            presented = LOCAL_KEY
        if not presented:
            raise Unauthorized("X-API-Key: missing; set TINKER_API_KEY to a key of this server")
        if is_token(presented):
            return self._by_token(presented)
        return self._by_digest(digest(presented))

    def owner(self, presented: str | None) -> str:
        """The owner id behind a key; Unauthorized as above."""
        return self.caller(presented).owner

    def check_not_revoked(self, caller: Caller) -> None:
        """Unauthorized when the key was revoked while the caller's request was answered."""
        entry = self._made.peek(caller.key_digest)
        if entry is not None and entry.revoked_ns is not None:
            raise _revoked()

    def is_configured(self, caller: Caller) -> bool:
        """Whether the key stands in the configuration, which nothing but its editor can change."""
        return caller.key_digest in self._configured

    def warn_if_empty(self) -> None:
        """Say in the log that nobody can call yet."""
        if not self._configured and not any(self._made):
            log.warning("no API key yet", remedy="make one with 'tinsmith keys create OWNER'")

    def _by_token(self, presented: str) -> Caller:
        if self._tokens is None:
            raise InvalidToken(
                "X-API-Key: tokens are not taken by this server (gateway.exchange_keys is off); "
                "present the API key itself"
            )
        return self._by_digest(self._tokens.key_digest(presented))._replace(is_by_token=True)

    def _by_digest(self, key_digest: str) -> Caller:
        if (entry := self._made.peek(key_digest)) is not None:
            _check_valid(entry)
            return Caller(entry.owner, key_digest, entry.name, entry.project_id)
        if (owner := self._configured.get(key_digest)) is not None:
            return Caller(owner, key_digest, owner)
        raise Unauthorized(
            "X-API-Key: not a key of this server; ask its operator for one "
            "('tinsmith keys create') and set TINKER_API_KEY"
        )


def _check_valid(entry: ApiKey) -> None:
    if entry.revoked_ns is not None:
        raise _revoked()
    if entry.expires_ns is not None and entry.expires_ns <= time.time_ns():
        raise Unauthorized(
            "X-API-Key: this key has expired; ask the server's operator for another and set "
            "TINKER_API_KEY: one made for the same owner reaches the same runs"
        )


def _revoked() -> Unauthorized:
    return Unauthorized(
        "X-API-Key: this key was revoked; ask the server's operator for another and set "
        "TINKER_API_KEY"
    )


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


def read_keys(config: GatewayConfig, default_file: Path) -> tuple[str, ...]:
    """The configured keys, or those in ``default_file`` when none is configured; maybe none.

    Raises:
        ConfigError: a key that no client could send, or a key file that cannot be read.
    """
    keys = [*_checked(config.api_keys, "gateway.api_keys")]
    if config.api_key_file:
        keys += _from_file(Path(config.api_key_file).expanduser())
    elif not keys and default_file.exists():
        keys += _from_file(default_file)
    return tuple(keys)


def with_operators(config: GatewayConfig, keys: Iterable[str], default_file: Path) -> GatewayConfig:
    """``config``, with the owner of the key that ``tinsmith up`` has made among the operators.

    ``keys`` are what ``read_keys`` found. Who has that key is who can read the data folder.
    """
    file = config.api_key_file
    if config.api_keys or (file and Path(file).expanduser() != default_file):
        return config
    made = map(owner_of_key, keys)
    return structs.replace(config, operators=(*config.operators, *made))


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
