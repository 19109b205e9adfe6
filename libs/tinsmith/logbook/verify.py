"""Verifying a log: every entry in turn, with all that it refers to."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from tinsmith.errors import BlobMissing
from tinsmith.logbook.anchors import Expected
from tinsmith.logbook.contents import check_sealed, op_of, parts_of, result_of, seal_of
from tinsmith.logbook.entry import LogDamaged
from tinsmith.logbook.file import FileLogbook
from tinsmith.logbook.rules import Rules
from tinsmith.logbook.samples import FileSamples
from tinsmith.messages import ops

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping

    from tinsmith.errors import TinsmithError
    from tinsmith.logbook.entry import Entry
    from tinsmith.logbook.samples import StoredSample
    from tinsmith.logbook.source import Logbook
    from tinsmith.messages.base import BlobRef


class _Reference(NamedTuple):
    field: str
    ref: BlobRef
    is_read: bool  # and so verified, on the way to the op or the result


class Verification:
    """One pass over one log."""

    def __init__(
        self,
        logbook: Logbook,
        model_id: str,
        *,
        take: Callable[[BlobRef], Awaitable[None]] | None = None,
    ) -> None:
        """``take`` is called with every blob once, before the first entry that refers to it.

        It must read the blob by ``logbook.blob``, which verifies it.
        """
        self._logbook = logbook
        self._take = take
        self.rules = Rules(model_id)
        self.model_id = model_id
        self.blobs: dict[str, int] = {}
        """Size by digest, of all blobs that were referred to so far."""
        self.why_closed: TinsmithError | None = None
        """Why the contents of some entries could not be checked: their key is not here."""
        self.samples = 0
        """How many of the run's logged samples were seen; without a file's they are elsewhere."""

    async def entries(self) -> AsyncIterator[Entry]:
        """Every entry in order, each verified; the log is, once they are all through.

        Raises:
            LogDamaged: what is wrong with the first bad entry.
        """
        # Before the log is read: it only grows, so that it must have all that is anchored by now.
        expected = Expected((await self._logbook.anchors()).of(self.model_id))
        async for entry in self._logbook.entries(self.model_id):
            place = self.rules.follow(entry)
            expected.see(entry, self.rules.number)
            for reference in await self._references(entry.entry, place):
                await self._check(reference, place)
            yield entry
        expected.require_all()
        if not self.rules.number:
            raise LogDamaged("the log", "entries", "it has none")
        if isinstance(self._logbook, FileLogbook):
            async for sample in FileSamples(self._logbook).stored(self.model_id):
                await self.check_sample(sample)
            if self.why_closed is None:  # else there may be blobs that only contents name
                self._logbook.require_only(self.blobs)

    async def check_sample(self, sample: StoredSample) -> None:
        """See to the weights that a sample was drawn with, as to what entries refer to."""
        self.samples += 1
        request = sample.record.request
        if request.adapter is not None:
            for reference in _parts(request.adapter.files):
                await self._check(reference, f"sample {request.request_id}")

    async def _references(self, entry: ops.LogEntry, place: str) -> list[_Reference]:
        if isinstance(entry, ops.StateSaved):
            return _parts(entry.parts)
        if isinstance(entry, ops.Owned):
            return []
        read = {"op_ref": entry.op_ref, "result_ref": entry.result_ref}
        found = [
            _Reference(field, ref, is_read=True) for field, ref in read.items() if ref is not None
        ]
        if (why_closed := (await seal_of(self._logbook, entry)).why_closed) is not None:
            self.why_closed = why_closed
            await check_sealed(self._logbook, entry, place)
            self.rules.pass_over(entry, place)
            return found
        op = await op_of(self._logbook, entry, place)
        result = await result_of(self._logbook, entry, place)
        self.rules.carry_out(entry, op, result, place)
        return found + _parts(parts_of(result))

    async def _check(self, reference: _Reference, place: str) -> None:
        field, ref, is_read = reference
        known = self.blobs.get(ref.blake3)
        if known is None:
            try:
                if self._take is not None:
                    await self._take(ref)
                elif not is_read:
                    await self._logbook.check_blob(ref)
            except BlobMissing as exc:
                raise LogDamaged(place, field, str(exc)) from exc
            self.blobs[ref.blake3] = ref.size
        elif known != ref.size:
            raise LogDamaged(place, field, f"blob {ref.blake3} has {known} bytes, not {ref.size}")


def _parts(parts: Mapping[str, BlobRef]) -> list[_Reference]:
    return [_Reference(f"parts[{name!r}]", ref, is_read=False) for name, ref in parts.items()]
