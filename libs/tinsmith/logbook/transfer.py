"""Logs on the move: from anywhere into a file, and from anywhere into an installation."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

from blake3 import blake3

from tinsmith import __version__
from tinsmith.errors import Gone, InvalidRequest, TooLarge
from tinsmith.logbook import draft
from tinsmith.logbook.container import CHUNK_BYTES, Kind, pack_part
from tinsmith.logbook.file import MAX_PARTS, Cover, End
from tinsmith.logbook.verify import Verification
from tinsmith.messages.base import encode
from tinsmith.sealing import ClosedSeal, KeySeal
from tinsmith.sealing.seal import moment

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from tinsmith.blobs import BlobStore
    from tinsmith.bus import CommitLog, SampleLog
    from tinsmith.logbook.samples import Samples
    from tinsmith.logbook.source import Logbook
    from tinsmith.messages.base import BlobRef
    from tinsmith.sealing import Seal, Seals


async def export(
    logbook: Logbook,
    model_id: str,
    path: Path,
    *,
    overwrite: bool,
    on_entry: Callable[[], None],
    samples: Samples | None = None,
    has_key: bool = True,
) -> Verification:
    """Write the model's log and all blobs behind it to ``path``, which is there once it is whole.

    ``samples`` are taken along, with the weights that they were drawn with. What is sealed stays
    so; with ``has_key`` its key is in the file, which can then be read alone.

    Raises:
        LogDamaged: the log does not verify.
        InvalidRequest: ``path`` exists and may not be overwritten, or cannot be written.
        Gone: the log was pruned before its samples were all read.
        StorageFull: the disk is full.
        TooLarge: a blob is larger than the format allows, or there are too many parts.
    """
    with draft.create(path, overwrite=overwrite) as file:

        async def take(ref: BlobRef) -> None:
            await _write(file, Kind.BLOB, await logbook.blob(ref))

        verification = Verification(logbook, model_id, take=take)
        seal = await logbook.seal(model_id)
        await _write(file, Kind.COVER, encode(_cover(model_id, seal, has_key=has_key)))
        anchored = tuple((await logbook.anchors()).of(model_id))
        if anchored:
            await _write(file, Kind.ANCHORS, encode(anchored))
        async for entry in verification.entries():
            await _write(file, Kind.ENTRY, entry.data)
            _check_number(verification.rules.number + len(verification.blobs))
            on_entry()
        if samples is not None:
            async for sample in samples.stored(model_id):
                await verification.check_sample(sample)
                await _write(file, Kind.SAMPLE, sample.data)
                _check_number(len(verification.blobs) + verification.samples)
            if model_id in await logbook.pruned():  # maybe its samples first
                raise Gone(f"run: {model_id}: its log was pruned while it was exported")
        end = End(
            entries=verification.rules.number,
            blobs=len(verification.blobs),
            head_blake3=verification.rules.head,
            samples=verification.samples,
            anchors=len(anchored),
        )
        await _write(file, Kind.END, encode(end))
    return verification


def _cover(model_id: str, seal: Seal, *, has_key: bool) -> Cover:
    return Cover(
        model_id=model_id,
        tinsmith=__version__,
        data_key=seal.key if isinstance(seal, KeySeal) and has_key else b"",
        forgotten=seal.forgotten if isinstance(seal, ClosedSeal) else None,
    )


def _check_number(parts: int) -> None:
    if parts > MAX_PARTS:
        raise TooLarge(f"the log needs over {MAX_PARTS} parts, more than the file format allows")


async def _write(file: draft.Draft, kind: Kind, data: bytes) -> None:
    if len(data) < CHUNK_BYTES:
        packed = pack_part(kind, data)
    else:
        packed = await asyncio.to_thread(pack_part, kind, data)
    for piece in packed:
        file.write(piece)


class Import:
    """Appends one log to an installation, entry by entry as they are."""

    def __init__(
        self, log: CommitLog, blobs: BlobStore, seals: Seals, *, on_entry: Callable[[], None]
    ) -> None:
        self._log = log
        self._blobs = blobs
        self._seals = seals
        self._on_entry = on_entry

    async def run(self, logbook: Logbook, model_id: str, *, resume: bool) -> None:
        """Append the model's log; the caller has verified it.

        With ``resume`` the installation may have the beginning of the very same log.

        Raises:
            NotFound: no service has run against the installation's broker yet.
            InvalidRequest: the installation has a log of the model, or has forgotten it.
            StartupError: the master key, which is to wrap the log's own, is not on this machine.
            Fenced: someone has appended to it meanwhile.
            StorageFull: the broker or the blob store is full.
        """

        async def take(ref: BlobRef) -> None:
            await self._blobs.put(await logbook.blob(ref))

        present = await self._present(model_id)
        if present and not resume:
            raise InvalidRequest(
                f"run: {model_id} has a log here already, of {len(present)} entries; an import "
                "that broke off is continued by --resume"
            )
        await self._require_beginning(logbook, model_id, present)
        await self._take_key(model_id, await logbook.seal(model_id))
        writer = await self._log.writer(model_id)
        number = 0
        async for entry in Verification(logbook, model_id, take=take).entries():
            number += 1
            if number > len(present):
                await writer.copy(entry.data)
            self._on_entry()

    async def _take_key(self, model_id: str, seal: Seal) -> None:
        """What the file knows of the key, or of its end, holds here too."""
        gone = await self._seals.forgotten(model_id)
        if isinstance(seal, ClosedSeal) and seal.forgotten is not None:
            told = seal.forgotten
            await self._seals.forget(model_id, told.reason, at_ns=told.forgotten_ns)
        elif isinstance(seal, KeySeal) and gone is not None:
            raise InvalidRequest(
                f"run: {model_id} was forgotten here on {moment(gone.forgotten_ns)}; it is not "
                "made readable again by an import"
            )
        elif isinstance(seal, KeySeal):
            await self._seals.adopt(model_id, seal.key)

    async def _present(self, model_id: str) -> list[str]:
        """The digests of the entries that are there."""
        if model_id not in await self._log.models():
            return []
        return [blake3(data).hexdigest() async for _, data in self._log.stored(model_id)]

    async def _require_beginning(self, logbook: Logbook, model_id: str, present: list[str]) -> None:
        same = 0
        async for entry in logbook.entries(model_id):
            if same == len(present) or present[same] != entry.blake3:
                break
            same += 1
        if same < len(present):
            raise InvalidRequest(
                f"run: the log of {model_id} here is another one from entry {same + 1} on"
            )


async def import_samples(samples: Samples, model_id: str, log: SampleLog) -> int:
    """Append the model's samples to an installation, after its log; how many were new there.

    Raises:
        StorageFull: the broker or the blob store is full.
    """
    new = 0
    async for sample in samples.stored(model_id):
        new += await log.append(sample.address, sample.data)
    return new
