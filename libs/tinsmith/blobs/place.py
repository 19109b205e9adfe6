"""What a blob store needs of the place where its bytes lie. Everything here blocks."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from obstore.store import ObjectStore


class Stored(NamedTuple):
    """One blob that is there, however often."""

    blake3: str
    size: int  # of all copies together
    used_s: float  # unix time: when it was last put


class Place(Protocol):
    """Bytes under keys of the form ``ab/cdef...``."""

    store: ObjectStore
    """For reading."""

    def find(self, key: str, size: int) -> str | None:
        """Under which key the bytes are read; None when they are not there, in that size."""
        ...

    def put(self, key: str, data: bytes) -> None:
        """Store durably; from now on ``free`` finds that it was put just now."""
        ...

    def free(self, key: str, unused_s: float) -> bool:
        """Delete unless it was put in the last ``unused_s``; whether it is gone."""
        ...

    def stored(self) -> Iterator[Stored]:
        """Everything that is there."""
        ...

    def leftovers(self, older_s: float, *, remove: bool) -> int:
        """Bytes that writers which died have left, ``older_s`` ago or earlier; gone if ``remove``.

        Marks that hold no bytes go with them.
        """
        ...
