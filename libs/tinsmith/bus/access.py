"""Who a service is to the broker, and how it knows the broker: name, password, inbox, TLS."""

from __future__ import annotations

import ssl
from pathlib import Path
from typing import TYPE_CHECKING, TypedDict

from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    from tinsmith.config import BusConfig


class Access(TypedDict):
    """Options of nats-py's ``connect``."""

    user: str | None
    password: str | None
    token: str | None
    user_credentials: str | None
    inbox_prefix: str
    tls: ssl.SSLContext | None
    tls_handshake_first: bool


def options(config: BusConfig) -> Access:
    """What ``config`` says of it. Raises ConfigError when a file cannot be used.

    With TLS the handshake comes before anything else: who stands between cannot talk the client
    into sending its password in clear, as it can where the server first says that it wants TLS.
    """
    tls = _context(config)
    return Access(
        user=config.user or None,
        password=_password(config) or None,
        token=config.token or None,
        user_credentials=config.credentials_file or None,
        inbox_prefix=config.inbox_prefix,
        tls=tls,
        tls_handshake_first=tls is not None,
    )


def _password(config: BusConfig) -> str:
    if not config.password_file:
        return config.password
    path = Path(config.password_file).expanduser()
    try:
        return path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"bus.password_file: {path} cannot be read ({error}); it holds the password of "
            f"{config.user!r} and nothing else"
        ) from error


def _context(config: BusConfig) -> ssl.SSLContext | None:
    is_asked_for = any(url.strip().startswith("tls://") for url in config.url.split(","))
    if not (is_asked_for or config.tls_ca or config.tls_cert):
        return None
    try:
        context = ssl.create_default_context(cafile=config.tls_ca or None)
        if config.tls_cert:
            context.load_cert_chain(config.tls_cert, config.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"bus: tls_ca = {config.tls_ca!r}, tls_cert = {config.tls_cert!r}, tls_key = "
            f"{config.tls_key!r} cannot be used ({error}); each is a PEM file, and the key belongs "
            "to the certificate"
        ) from error
    return context
