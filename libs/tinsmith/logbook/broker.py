"""The logs of a running installation, read from its broker and its blob store."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from tinsmith import ids
from tinsmith.errors import BlobMissing
from tinsmith.logbook.entry import Entry, LogDamaged, place_of
from tinsmith.messages.ops import Owned, Record
from tinsmith.messages.table import LOG_TEMPLATE

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tinsmith.blobs import BlobStore
    from tinsmith.bus import CommitLog
    from tinsmith.messages.base import BlobRef
    from tinsmith.messages.ops import LogEntry

_DIGEST = re.compile(r"[0-9a-f]{64}")


class BrokerLogbook:
    """A ``Logbook``."""

    def __init__(self, log: CommitLog, blobs: BlobStore) -> None:
        self._log = log
        self._blobs = blobs

    async def runs(self) -> list[str]:
        """See ``Logbook``."""
        return await self._log.models()

    async def length(self, model_id: str) -> int:
        """See ``Logbook``."""
        return await self._log.length(model_id)

    async def entries(self, model_id: str) -> AsyncIterator[Entry]:
        """See ``Logbook``."""
        async for subject, data in self._log.stored(model_id):
            entry = Entry.read(data, subject)
            expected = subject_of(model_id, entry.entry)
            if subject != expected:
                # Futures are read by subject: under another one, it is another op's answer.
                problem = f"stored under {subject}, not {expected}"
                raise LogDamaged(place_of(entry.entry), "subject", problem)
            yield entry

    async def blob(self, ref: BlobRef) -> bytes:
        """See ``Logbook``."""
        if _DIGEST.fullmatch(ref.blake3) is None:
            raise BlobMissing(f"blob {ref.blake3[:80]!r}: not the name of a blob")
        return await self._blobs.get(ref)


def subject_of(model_id: str, entry: LogEntry) -> str:
    """Where the broker keeps ``entry`` of the model."""
    match entry:
        case Record(seq=number):
            kind = "op"
        case Owned(epoch=number):
            kind = "own"
        case _:
            kind, number = "state", entry.seq
    return LOG_TEMPLATE.subject(model=ids.token(model_id), kind=kind, number=str(number))
