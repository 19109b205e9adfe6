"""What a log holds, read once before anything of it is computed."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tinsmith.errors import NotFound
from tinsmith.logbook import op_of
from tinsmith.logbook.contents import require_open
from tinsmith.messages import ops

if TYPE_CHECKING:
    from tinsmith.logbook import Logbook


@dataclass(frozen=True)
class Outline:
    """The frame of one model's log."""

    newest: int
    """Seq of the last op."""
    states: tuple[ops.StateSaved, ...]
    """The saved states, in order of their ops; without those that no digest vouches for."""
    environments: tuple[dict[str, str], ...]
    """What each owner that recorded an op computed with, in order; each names its base model."""


async def read_outline(logbook: Logbook, model_id: str) -> Outline:
    """Read the whole log of ``model_id`` once.

    Raises:
        LogDamaged: it cannot be read.
        NotFound: it has no op.
        Forgotten, SealBroken: its contents cannot be read.
    """
    newest, base_model = -1, ""
    states: dict[int, ops.StateSaved] = {}
    environments: dict[int, dict[str, str]] = {}
    environment: dict[str, str] = {}
    async for item in logbook.entries(model_id):
        match item.entry:
            case ops.Owned():
                environment = item.entry.environment
            case ops.StateSaved(seq=seq, state_blake3=digest):
                if digest:
                    states[seq] = item.entry
            case ops.Record(seq=seq, epoch=epoch) as record:
                await require_open(logbook, record)  # before a base model is loaded for nothing
                newest = max(newest, seq)
                environments.setdefault(epoch, environment)
                if seq == 0:
                    told = environment.get("base_model")
                    base_model = told or await _base_model(logbook, record)
    if newest < 0:
        raise NotFound(f"run: the log of {model_id} has no op yet; there is nothing to replay")
    return Outline(
        newest,
        tuple(states[seq] for seq in sorted(states)),
        tuple({"base_model": base_model, **told} for told in environments.values()),
    )


async def _base_model(logbook: Logbook, record: ops.Record) -> str:
    body = (await op_of(logbook, record)).body
    return body.base_model if isinstance(body, ops.CreateModel) else ""
