"""Whether a server can be reached at all."""

from __future__ import annotations

import socket
import threading
import urllib.parse

REACH_S = 2.0


def unreachable(url: str, *, default_port: int) -> str:
    """Why no connection to ``url`` can be made; empty when one can."""
    parts = urllib.parse.urlsplit(url)
    host, port = parts.hostname or "", parts.port or default_port
    reasons = [f"{host} does not answer"]

    def connect() -> None:
        try:
            socket.create_connection((host, port), timeout=REACH_S).close()
            reasons[0] = ""
        except OSError as error:
            reasons[0] = f"{host} cannot be reached: {error.strerror or error}"

    # On a thread: nothing but leaving it limits how long the name is looked up.
    thread = threading.Thread(target=connect, name="reach", daemon=True)
    thread.start()
    thread.join(REACH_S)
    return reasons[0]
