"""What exists, and whose it is: every look-up tells the caller's own from all the rest.

What belongs to someone else is reported exactly as what does not exist.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from tinsmith import ids
from tinsmith.errors import Gone, InvalidRequest, NotFound
from tinsmith.messages.table import CHECKPOINTS, RUNS, SAMPLERS, SERVED, SESSIONS
from tinsmith_gateway.views import View

if TYPE_CHECKING:
    from tinsmith.bus import Bus
    from tinsmith.messages.checkpoints import Checkpoint
    from tinsmith.messages.registry import Run, Sampler, Session

MAKERS = {
    "weights": "save_state",
    "sampler_weights": "save_weights_for_sampler",
    "external_weights": "save_weights_external",
}
"""Kinds of checkpoints that have a name, and the client's method that makes each."""


class Registry:
    """The gateway's view of all tables."""

    def __init__(self, bus: Bus) -> None:
        self.sessions = View(bus.table(SESSIONS), lambda session: session.owner)
        self.runs = View(bus.table(RUNS), lambda run: run.owner)
        self.samplers = View(bus.table(SAMPLERS), lambda sampler: sampler.session_id)
        self.checkpoints = View(bus.table(CHECKPOINTS), lambda checkpoint: checkpoint.model_id)
        self.served = View(bus.table(SERVED), lambda served: served.name)
        self._watches = AsyncExitStack()

    async def start(self) -> None:
        """Fills the views and follows the tables."""
        for view in (self.sessions, self.runs, self.samplers, self.checkpoints, self.served):
            watch = await view.watch()
            self._watches.push_async_callback(watch.close)

    async def close(self) -> None:
        """Stops following."""
        await self._watches.aclose()

    async def session(self, owner: str, session_id: str) -> Session:
        """A session of ``owner``; NotFound otherwise."""
        found = await self.sessions.get(ids.token(ids.check_session_id(session_id)))
        if found is None or found.owner != owner:
            raise NotFound(f"session_id: there is no session {session_id}; create one first")
        return found

    async def run(self, owner: str, model_id: str) -> Run:
        """A model of ``owner``; NotFound otherwise."""
        found = await self.runs.get(ids.token(ids.check_model_id(model_id)))
        if found is None or found.owner != owner:
            raise NotFound(f"model_id: there is no model {model_id}; create it first")
        return found

    async def sampler(self, owner: str, sampler_id: str) -> Sampler:
        """A sampling session of ``owner``; NotFound otherwise."""
        found = await self.samplers.get(ids.token(ids.check_sampler_id(sampler_id)))
        if found is None or found.owner != owner:
            raise NotFound(
                f"sampling_session_id: there is no sampling session {sampler_id}; create it first"
            )
        return found

    async def checkpoint(self, owner: str, text: str) -> Checkpoint:
        """The checkpoint of ``owner`` at a tinker:// path.

        Raises:
            InvalidRequest: not a path.
            NotFound: no such checkpoint, or not the caller's.
            Gone: it has expired.
        """
        path = ids.parse_path(text)
        found = await self.checkpoints.get(ids.checkpoint_key(path))
        if found is None or await self._owner_of(found) != owner:
            raise NotFound(
                f"path: there is no checkpoint {text}; list those there are with "
                "RestClient.list_user_checkpoints"
            )
        if is_expired(found):
            raise Gone(
                f"path: {text} expired on {iso_time(found.expires_ns or 0)}; "
                "save with a longer ttl_seconds, or without one"
            )
        return found

    async def checkpoint_of_kind(self, owner: str, text: str, kind: str, use: str) -> Checkpoint:
        """As ``checkpoint``; InvalidRequest as well when it is not of the ``kind`` for ``use``."""
        if (given := ids.parse_path(text).kind) != kind:
            raise InvalidRequest(
                f"path: {text} is of kind {given!r}, but {use} needs {kind!r}; "
                f"make one with {MAKERS[kind]}"
            )
        return await self.checkpoint(owner, text)

    def listed_checkpoints(self, model_id: str) -> list[Checkpoint]:
        """The checkpoints of a run that have a name and have not expired, newest first."""
        found = (c for c in self.checkpoints.group(model_id) if c.kind in MAKERS)
        return sorted(
            (c for c in found if not is_expired(c)), key=lambda c: c.created_ns, reverse=True
        )

    async def _owner_of(self, checkpoint: Checkpoint) -> str:
        if checkpoint.owner:
            return checkpoint.owner
        run = await self.runs.get(ids.token(checkpoint.model_id))
        return "" if run is None else run.owner


def is_expired(checkpoint: Checkpoint) -> bool:
    """Whether its time to live is over, removed already or not."""
    return checkpoint.expires_ns is not None and checkpoint.expires_ns <= time.time_ns()


def iso_time(unix_ns: int) -> str:
    """Unix time in ns as ISO 8601 in UTC."""
    return datetime.fromtimestamp(unix_ns / 1e9, UTC).isoformat()
