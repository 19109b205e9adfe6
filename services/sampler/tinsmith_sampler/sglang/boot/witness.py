"""Answers questions about SGLang's memory beside its service, on a thread of its scheduler.

On a socket in a folder that only the server's user can enter. A connection has one question and one
answer, each a line of JSON.
"""

from __future__ import annotations

import json
import socketserver
import threading
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    Answer = Callable[[dict[str, Any]], dict[str, Any]]

SOCKET = "weights.sock"


def start(folder: Path, answer: Answer) -> None:
    """Answer from now on, for as long as the process lives."""

    class Handler(socketserver.StreamRequestHandler):
        def handle(self) -> None:
            try:
                told = answer(json.loads(self.rfile.readline()))
            except Exception as exc:  # noqa: BLE001 - who asks is told, and the server goes on
                told = {"error": f"{type(exc).__name__}: {exc}"}
            self.wfile.write(json.dumps(told).encode() + b"\n")

    server = socketserver.UnixStreamServer(str(folder / SOCKET), Handler)
    threading.Thread(target=server.serve_forever, name="tinsmith-weights", daemon=True).start()
