"""What an entry refers to: its op, its result, its blobs; checked against the entry's digests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec

from tinsmith.errors import BlobMissing, SealBroken
from tinsmith.logbook.entry import DigestMismatch, LogDamaged, place_of
from tinsmith.messages import ops
from tinsmith.messages.base import decoder
from tinsmith.sealing import PLAIN, aside, suited
from tinsmith.sealing.seal import is_sealed

if TYPE_CHECKING:
    from tinsmith.logbook.source import Logbook
    from tinsmith.messages.base import BlobRef
    from tinsmith.sealing import Seal

MAX_MESSAGE_BYTES = 1 << 30
"""Of an op or a result in the blob store, which are read into memory."""

_DECODERS = {"op": decoder(ops.Op), "result": decoder(ops.OpResult)}
_WITH_PARTS = (ops.CreateModelDone, ops.LoadWeightsDone, ops.StateSaved)


async def op_of(logbook: Logbook, record: ops.Record, place: str = "") -> ops.Op:
    """The op of ``record``; errors call the entry ``place``.

    Raises:
        DigestMismatch: its bytes are not those that were executed.
        LogDamaged: they are absent, or no op.
        Forgotten, SealBroken: they are sealed, and their key is destroyed or not here.
    """
    op: ops.Op = await _message(logbook, record, "op", place or place_of(record))
    return op


async def result_of(logbook: Logbook, record: ops.Record, place: str = "") -> ops.OpResult:
    """What the op of ``record`` answered; raises as ``op_of``."""
    result: ops.OpResult = await _message(logbook, record, "result", place or place_of(record))
    return result


async def seal_of(logbook: Logbook, record: ops.Record) -> Seal:
    """What opens the op and the result of ``record``."""
    if not record.sealed:
        return PLAIN
    return suited(await logbook.seal(record.model_id), record.sealed)


async def require_open(logbook: Logbook, record: ops.Record) -> Seal:
    """As ``seal_of``; Forgotten or SealBroken when it opens nothing."""
    seal = await seal_of(logbook, record)
    if seal.why_closed is not None:
        raise seal.why_closed
    return seal


async def check_sealed(logbook: Logbook, record: ops.Record, place: str) -> None:
    """As much as can be said of the op and the result of ``record`` without their key.

    Raises:
        LogDamaged: they are absent, or were never sealed.
    """
    for field in _DECODERS:
        if not is_sealed(await _bytes(logbook, record, field, place)):
            raise LogDamaged(place, field, "the record says that it is sealed, but it is not")


def parts_of(found: ops.StateSaved | ops.OpResult) -> dict[str, BlobRef]:
    """The blobs that a replay needs, by name: a saved state's, or what was loaded."""
    return found.parts if isinstance(found, _WITH_PARTS) else {}


async def _message(logbook: Logbook, record: ops.Record, field: str, place: str) -> Any:  # noqa: ANN401
    stored = await _bytes(logbook, record, field, place)
    seal = await require_open(logbook, record)
    try:
        data = await aside(seal.open, stored)
    except SealBroken as exc:
        raise DigestMismatch(place, f"{field}_blake3", str(exc)) from exc
    expected: str = getattr(record, f"{field}_blake3")
    found = await aside(seal.digest, data)
    if found != expected:
        problem = f"the bytes have the digest {found}, not {expected}"
        raise DigestMismatch(place, f"{field}_blake3", problem)
    try:
        return _DECODERS[field].decode(data)
    except msgspec.MsgspecError as exc:
        problem = f"not one that this version of Tinsmith can read ({exc})"
        raise LogDamaged(place, field, problem) from exc


async def _bytes(logbook: Logbook, record: ops.Record, field: str, place: str) -> bytes:
    inline: bytes | None = getattr(record, field)
    ref: BlobRef | None = getattr(record, f"{field}_ref")
    if (inline is None) == (ref is None):
        problem = "the entry must have either its bytes or a reference to them"
        raise LogDamaged(place, field, problem)
    if ref is None:
        return inline or b""
    if ref.size > MAX_MESSAGE_BYTES:
        problem = f"{ref.size} bytes are over the limit of {MAX_MESSAGE_BYTES}"
        raise LogDamaged(place, f"{field}_ref", problem)
    try:
        return await logbook.blob(ref)
    except BlobMissing as exc:
        raise LogDamaged(place, f"{field}_ref", str(exc)) from exc
