"""One row per run: what its log comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec

from tinsmith.logbook.entry import LogDamaged, place_of
from tinsmith.messages.base import decoder
from tinsmith.messages.ops import CreateModel, OptimStepDone, Record

if TYPE_CHECKING:
    from tinsmith.logbook.source import Logbook


class _Body(msgspec.Struct):
    """What of an op's body matters here; decoding skips the rest."""

    t: str = ""
    base_model: str = ""


class _Op(msgspec.Struct):
    body: _Body


class _Result(msgspec.Struct):
    t: str = ""


_OPS = decoder(_Op)
_RESULTS = decoder(_Result)
_CREATE = CreateModel.__struct_config__.tag
_STEPPED = OptimStepDone.__struct_config__.tag


@dataclass
class Overview:
    """What is known of a run from its log alone; blobs are not read."""

    model_id: str
    base_model: str = ""
    entries: int = 0
    ops: int = 0
    steps: int = 0  # optimizer steps that succeeded
    epochs: int = 0  # owners, one after the other
    state_blake3: str = ""
    head_blake3: str = ""
    damage: str = ""
    """Why reading ended early."""

    def add(self, record: Record) -> None:
        """Count one op. Large ops and results lie in blobs, and are none of those looked for."""
        self.ops += 1
        self.state_blake3 = record.state_blake3 or self.state_blake3
        try:
            if record.op is not None and record.seq == 0:
                body = _OPS.decode(record.op).body
                self.base_model = body.base_model if body.t == _CREATE else ""
            if record.result is not None and _RESULTS.decode(record.result).t == _STEPPED:
                self.steps += 1
        except msgspec.MsgspecError as exc:
            raise LogDamaged(place_of(record), "op or result", str(exc)) from exc


async def overview(logbook: Logbook, model_id: str) -> Overview:
    """The row of one run. Nothing is verified."""
    row = Overview(model_id)
    try:
        async for entry in logbook.entries(model_id):
            row.entries += 1
            row.epochs = entry.entry.epoch
            row.head_blake3 = entry.blake3
            if isinstance(entry.entry, Record):
                row.add(entry.entry)
    except LogDamaged as exc:
        row.damage = str(exc)
    return row
