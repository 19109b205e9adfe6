"""What an entry refers to: its op, its result, its blobs; checked against the entry's digests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import msgspec
from blake3 import blake3

from tinsmith.errors import BlobMissing
from tinsmith.logbook.entry import DigestMismatch, LogDamaged, place_of
from tinsmith.messages.base import decoder
from tinsmith.messages.ops import Op, OpResult

if TYPE_CHECKING:
    from tinsmith.logbook.source import Logbook
    from tinsmith.messages.base import BlobRef
    from tinsmith.messages.ops import Record

_OPS = decoder(Op)
_RESULTS = decoder(OpResult)


async def op_of(logbook: Logbook, record: Record) -> Op:
    """The op of ``record``.

    Raises:
        DigestMismatch: its bytes are not those that were executed.
        LogDamaged: they are absent, or no op.
    """
    op: Op = await _read(logbook, record, "op", _OPS)
    return op


async def result_of(logbook: Logbook, record: Record) -> OpResult:
    """What the op of ``record`` answered; raises as ``op_of``."""
    result: OpResult = await _read(logbook, record, "result", _RESULTS)
    return result


async def _read(
    logbook: Logbook, record: Record, field: str, decoder_: msgspec.msgpack.Decoder[Any]
) -> Any:  # noqa: ANN401 - what the decoder gives
    place = place_of(record)
    data = await _bytes(logbook, record, field)
    expected: str = getattr(record, f"{field}_blake3")
    found = blake3(data).hexdigest()
    if found != expected:
        problem = f"the bytes have the digest {found}, not {expected}"
        raise DigestMismatch(place, f"{field}_blake3", problem)
    try:
        return decoder_.decode(data)
    except msgspec.MsgspecError as exc:
        problem = f"not one that this version of Tinsmith can read ({exc})"
        raise LogDamaged(place, field, problem) from exc


async def _bytes(logbook: Logbook, record: Record, field: str) -> bytes:
    inline: bytes | None = getattr(record, field)
    ref: BlobRef | None = getattr(record, f"{field}_ref")
    if inline is not None and ref is None:
        return inline
    if ref is None or inline is not None:
        problem = "the entry must have either its bytes or a reference to them"
        raise LogDamaged(place_of(record), field, problem)
    try:
        return await logbook.blob(ref)
    except BlobMissing as exc:
        raise LogDamaged(place_of(record), f"{field}_ref", str(exc)) from exc
