"""The gateway's certificate: clients that speak TLS need no proxy before it."""

from __future__ import annotations

import ssl
from typing import TYPE_CHECKING

from tinsmith.errors import ConfigError

if TYPE_CHECKING:
    from tinsmith_gateway.config import GatewayConfig


def tls_context(config: GatewayConfig) -> ssl.SSLContext | None:
    """With which the gateway answers; None for plain HTTP. Raises ConfigError."""
    if not config.tls_cert:
        return None
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    try:
        context.load_cert_chain(config.tls_cert, config.tls_key or None)
    except (OSError, ssl.SSLError) as error:
        raise ConfigError(
            f"gateway: tls_cert = {config.tls_cert!r}, tls_key = {config.tls_key!r} cannot be used "
            f"({error}); each is a PEM file, and the key belongs to the certificate"
        ) from error
    return context
