"""Commands from the event loop to the engine's thread, in order; closed for good when it ends."""

from __future__ import annotations

from threading import Condition
from typing import Generic, TypeVar

from tinsmith.errors import ServerError

Command = TypeVar("Command")


class Mailbox(Generic[Command]):
    """Many senders, one receiver."""

    def __init__(self) -> None:
        self._commands: list[Command] = []
        self._changed = Condition()
        self._closed: str | None = None

    def put(self, command: Command) -> None:
        """Send; ServerError with the reason when the mailbox has been closed."""
        with self._changed:
            if self._closed is not None:
                raise ServerError(self._closed)
            self._commands.append(command)
            self._changed.notify()

    def take(self, *, wait: bool) -> list[Command]:
        """All commands there are; with ``wait`` at least one."""
        with self._changed:
            self._changed.wait_for(lambda: self._commands or not wait)
            taken, self._commands = self._commands, []
            return taken

    def close(self, reason: str) -> None:
        """Refuse further commands with ``reason``; those that nobody took are gone."""
        with self._changed:
            self._closed = reason
            self._commands.clear()
