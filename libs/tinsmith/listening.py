"""The socket that clients connect to: opened once, shared by all processes that answer on it.

One socket that workers inherit, and not one for each of them (``SO_REUSEPORT``): what the kernel
has queued on it belongs to no worker. A worker that dies takes along only what it has begun, one
that is busy takes no share that others could serve, and while none is there connections wait
instead of being refused.
"""

from __future__ import annotations

import errno
import os
import socket

from tinsmith.errors import StartupError

VARIABLE = "TINSMITH_LISTEN_FD"
BACKLOG = 4096  # of connections that nobody has accepted yet; the kernel may allow fewer


def bind(host: str, port: int, *, section: str = "gateway") -> socket.socket:
    """Listens; StartupError names the setting when that cannot be. ``host`` "" is all of IPv4.

    ``section`` of the configuration is where host and port stand.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        return socket.create_server(
            (host, port), family=family, backlog=BACKLOG, dualstack_ipv6=host == "::"
        )
    except OSError as error:
        raise StartupError(_cannot_listen(section, host, port, error)) from error


def inherited() -> socket.socket | None:
    """The socket that the parent has opened for us, if it has; once."""
    text = os.environ.pop(VARIABLE, "")
    if not text:
        return None
    try:
        return socket.socket(fileno=int(text))
    except (ValueError, OSError) as error:
        raise StartupError(
            f"{VARIABLE}: {text!r} is not a socket that was handed down ({error}); unset it"
        ) from error


def url_of(listening: socket.socket, host: str, *, is_tls: bool = False) -> str:
    """Under which clients on this machine reach it; ``host`` as it was given to ``bind``."""
    port: int = listening.getsockname()[1]
    if host in ("0.0.0.0", "::", ""):
        host = "127.0.0.1"
    scheme = "https" if is_tls else "http"
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _cannot_listen(section: str, host: str, port: int, error: OSError) -> str:
    address = f"{section}: cannot listen on {host}:{port}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"{address}: {section}.port {port} is taken by another program; stop that, or "
            f"choose another with TINSMITH_{section.upper()}__PORT"
        )
    return f"{address} ({error.strerror or error}); set {section}.host and {section}.port"
