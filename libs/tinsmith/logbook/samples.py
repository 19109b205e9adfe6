"""Reading the log of samples, wherever it lies: on a broker, or in an exported file."""

from __future__ import annotations

from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

import msgspec

from tinsmith import ids
from tinsmith.bus.samples import SampleAddress, subject_of
from tinsmith.errors import BlobMissing, InvalidRequest
from tinsmith.logbook.entry import LogDamaged
from tinsmith.logbook.pruned import present_run
from tinsmith.logbook.source import is_file
from tinsmith.messages.base import decoder
from tinsmith.messages.sampling import SampleRecord
from tinsmith.sealing import Seals

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from tinsmith.blobs import BlobStore
    from tinsmith.bus import SampleLog
    from tinsmith.config import Config
    from tinsmith.logbook.file import FileLogbook
    from tinsmith.messages.base import BlobRef
    from tinsmith.sealing import Seal

_RECORDS = decoder(SampleRecord)


@dataclass(frozen=True)
class StoredSample:
    """A record as it is stored."""

    data: bytes
    record: SampleRecord

    @property
    def address(self) -> SampleAddress:
        """Where it belongs."""
        return SampleAddress(
            self.record.run, self.record.request.sampler_id, self.record.request.seq
        )

    @classmethod
    def read(cls, data: bytes, run: str, place: str) -> StoredSample:
        """Decode ``data``; LogDamaged when it is no record of ``run``."""
        try:
            found = cls(data, _RECORDS.decode(data))
        except msgspec.MsgspecError as exc:
            problem = f"not a sample that this version of Tinsmith can read ({exc})"
            raise LogDamaged(place, "sample", problem) from exc
        if found.record.run != run:
            raise LogDamaged(place, "run", f"{found.record.run!r} is not {run}")
        return found


class Samples(Protocol):
    """The samples of some runs, and the blobs that they refer to. Only for reading."""

    async def count(self, run: str) -> int:
        """How many samples of ``run`` there are now."""

    def stored(self, run: str) -> AsyncIterator[StoredSample]:
        """Every sample of ``run`` in the order of logging, up to the present last.

        Raises:
            LogDamaged: the next one cannot be read, or does not belong where it lies.
        """

    async def blob(self, ref: BlobRef) -> bytes:
        """The bytes that ``ref`` names, verified. BlobMissing when they are absent or damaged."""

    async def seal(self, run: str) -> Seal:
        """What the contents of the run's samples are sealed with; closed when that is not here."""


class BrokerSamples:
    """The ``Samples`` of a running installation."""

    def __init__(self, log: SampleLog, blobs: BlobStore, seals: Seals) -> None:
        self._log = log
        self._blobs = blobs
        self._seals = seals

    async def count(self, run: str) -> int:
        """See ``Samples``."""
        return await self._log.count(run)

    async def stored(self, run: str) -> AsyncIterator[StoredSample]:
        """See ``Samples``."""
        seen: set[str] = set()
        try:
            async for subject, data in self._log.stored(run):
                yield _checked(run, subject, data, seen)
        except BlobMissing as exc:
            raise LogDamaged(f"the samples of {run}", "sample", str(exc)) from exc

    async def blob(self, ref: BlobRef) -> bytes:
        """See ``Samples``."""
        return await self._blobs.get(ref)

    async def seal(self, run: str) -> Seal:
        """See ``Samples``."""
        return await self._seals.of(run)


class FileSamples:
    """The ``Samples`` in an exported file."""

    def __init__(self, book: FileLogbook) -> None:
        self._book = book

    async def count(self, run: str) -> int:
        """See ``Samples``."""
        return len(self._book.sample_parts(run))

    async def stored(self, run: str) -> AsyncIterator[StoredSample]:
        """See ``Samples``."""
        seen: set[str] = set()
        for number, part in enumerate(self._book.sample_parts(run), start=1):
            place = f"sample {number}"
            found = StoredSample.read(self._book.read(part, place, "sample"), run, place)
            _require_new(subject_of(found.address), place, seen)
            yield found

    async def blob(self, ref: BlobRef) -> bytes:
        """See ``Samples``."""
        return await self._book.blob(ref)

    async def seal(self, run: str) -> Seal:
        """See ``Samples``."""
        return await self._book.seal(run)


@asynccontextmanager
async def open_samples(text: str, config: Config) -> AsyncIterator[tuple[Samples, str]]:
    """The samples that ``text`` on a command line means, and whose they are.

    A model's are found as its log is; those from the base model, by the whole id of the session
    in which they were drawn.

    Raises:
        NotFound: there is no such run or file.
        InvalidRequest: several runs begin with ``text``.
        Gone: its log was pruned, and these with it.
    """
    if is_file(text):
        from tinsmith.logbook.file import FileLogbook

        with FileLogbook.open(Path(text)) as book:
            yield FileSamples(book), (await book.runs())[0]
    else:
        from tinsmith.logbook.installation import connect

        async with connect(config, name="samples") as (bus, blobs):
            run = text
            if not is_session(text):
                run = present_run(await bus.log.models(), await bus.pruning.marks(), text)
            yield BrokerSamples(bus.samples, blobs, Seals(bus, config)), run


def is_session(text: str) -> bool:
    """Whether ``text`` is the id of a session: it owns what was drawn from the base model."""
    try:
        ids.check_session_id(text)
    except InvalidRequest:
        return False
    return True


def _checked(run: str, subject: str, data: bytes, seen: set[str]) -> StoredSample:
    found = StoredSample.read(data, run, subject)
    if subject != subject_of(found.address):
        problem = f"stored under {subject}, not {subject_of(found.address)}"
        raise LogDamaged(f"sample {found.record.request.request_id}", "subject", problem)
    _require_new(subject, f"sample {found.record.request.request_id}", seen)
    return found


def _require_new(subject: str, place: str, seen: set[str]) -> None:
    if subject in seen:
        raise LogDamaged(place, "subject", "logged before; a request is logged once")
    seen.add(subject)
