"""``tinsmith log forget``: asks whether it is meant, and whether it may be done."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING

import typer

from tinsmith import ids
from tinsmith.errors import InvalidRequest
from tinsmith.logbook.installation import connect
from tinsmith.logbook.source import resolve_run
from tinsmith.messages import table
from tinsmith.messages.services import AuditEntry
from tinsmith.sealing import Seals
from tinsmith.sealing.seal import moment

if TYPE_CHECKING:
    from tinsmith.bus import Bus
    from tinsmith.config import Config

OK = 0
REASON = "tinsmith log forget"


async def forget(loaded: Config, target: str, *, is_sure: bool, is_forced: bool) -> int:
    """Destroy the run's key.

    Raises:
        NotFound: there is no such run.
        InvalidRequest: it has no key, its session has not ended, or nobody is sure.
    """
    async with connect(loaded, name="log-forget") as (bus, _):
        runs = {*await bus.log.models(), *await bus.pruning.marks()}
        model_id = resolve_run(sorted(runs), target)
        seals = Seals(bus, loaded)
        gone = await seals.forgotten(model_id)
        if gone is None:
            if not await seals.has_key(model_id):
                raise InvalidRequest(
                    f"run: {model_id} is not sealed: its log was written with sealing.enabled = "
                    "false, or comes from elsewhere without its key; it cannot be forgotten"
                )
            await _require_ended(bus, model_id, is_forced=is_forced)
            if not is_sure:
                _ask(model_id)
        entry = await seals.forget(model_id, REASON)
        if gone is None:
            await _note(bus, model_id)
    told = "was" if gone else "is"
    sys.stdout.write(f"{model_id}: {told} forgotten, on {moment(entry.forgotten_ns)}\n")
    return OK


async def _note(bus: Bus, model_id: str) -> None:
    """In the trail of the run's owner."""
    run = await bus.table(table.RUNS).get(ids.token(model_id))
    if run is not None:
        told = {"model_id": model_id, "by": "operator"}
        await bus.audit.add(
            AuditEntry(
                owner=run.owner, topic="logs", event="run_forgotten", at_ns=time.time_ns(),
                details=told,
            )
        )  # fmt: skip


async def _require_ended(bus: Bus, model_id: str, *, is_forced: bool) -> None:
    session = await bus.table(table.SESSIONS).get(ids.token(ids.session_of(model_id)))
    if session is not None and session.status == "active" and not is_forced:
        raise InvalidRequest(
            f"run: {model_id} is live: its session has not ended; end its client and wait for the "
            "session to expire, or break it off with --force"
        )


def _ask(model_id: str) -> None:
    if not sys.stdin.isatty():
        raise InvalidRequest("--yes: needed where nobody can be asked; what is forgotten is lost")
    question = f"Forget {model_id}? What it was trained on and what came out are lost for good."
    if not typer.confirm(question):
        raise InvalidRequest("nothing was forgotten")
