"""What exists, and whose it is: every look-up tells the caller's own from all the rest.

What belongs to someone else is reported exactly as what does not exist.
"""

from __future__ import annotations

import time
from contextlib import AsyncExitStack
from typing import TYPE_CHECKING

from tinsmith import ids
from tinsmith.bus.views import View
from tinsmith.errors import Gone, InvalidRequest, NotFound
from tinsmith.messages.table import API_KEYS, CHECKPOINTS, RUNS, SAMPLERS, SERVED, SESSIONS, USAGE
from tinsmith_gateway.wire.times import iso_time

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
        self.usage = View(bus.table(USAGE), lambda used: used.owner)
        self.api_keys = View(bus.table(API_KEYS), lambda key: key.owner)
        self._watches = AsyncExitStack()

    async def start(self) -> None:
        """Fills the views and follows the tables."""
        views = (
            *(self.sessions, self.runs, self.samplers, self.checkpoints),
            *(self.served, self.usage, self.api_keys),
        )
        for view in views:
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

    def session_now(self, session_id: str) -> Session | None:
        """A session as far as this gateway has heard, whoever its owner is."""
        return self.sessions.peek(ids.token(session_id))

    async def run(self, owner: str, model_id: str) -> Run:
        """A model of ``owner``; NotFound otherwise."""
        found = await self.runs.get(ids.token(ids.check_model_id(model_id)))
        if found is None or found.owner != owner:
            raise NotFound(f"model_id: there is no model {model_id}; create it first")
        return found

    async def owner_of_run(self, model_id: str) -> str | None:
        """Whose a model is, for an operator, who sees all."""
        found = await self.runs.get(ids.token(ids.check_model_id(model_id)))
        return None if found is None else found.owner

    async def sampler(self, owner: str, sampler_id: str) -> Sampler:
        """A sampling session of ``owner``; NotFound otherwise."""
        found = await self.samplers.get(ids.token(ids.check_sampler_id(sampler_id)))
        if found is None or found.owner != owner:
            raise NotFound(
                f"sampling_session_id: there is no sampling session {sampler_id}; create it first"
            )
        return found

    async def readable_run(self, owner: str, model_id: str) -> tuple[Run, list[Checkpoint]]:
        """A model of ``owner`` with all its checkpoints; anybody's with those that are published.

        NotFound when there are none, or no such model.
        """
        found = await self.runs.get(ids.token(ids.check_model_id(model_id)))
        if found is not None:
            checkpoints = self.listed_checkpoints(model_id)
            if found.owner == owner:
                return found, checkpoints
            if published := [c for c in checkpoints if c.public]:
                return found, published
        raise NotFound(f"model_id: there is no model {model_id}; create it first")

    async def checkpoint(
        self, owner: str, text: str, *, token_owner: str | None = None
    ) -> Checkpoint:
        """The checkpoint at a tinker:// path: of ``owner``, of ``token_owner``, or published.

        Raises:
            InvalidRequest: not a path.
            NotFound: no such checkpoint, or not one that the caller may read.
            Gone: it has expired.
        """
        path = ids.parse_path(text)
        found = await self.checkpoints.get(ids.checkpoint_key(path))
        readers = {owner, token_owner}
        if found is None or not (found.public or await self._owner_of(found) in readers):
            raise _no_checkpoint(text)
        if is_expired(found):
            raise Gone(
                f"path: {text} expired on {iso_time(found.expires_ns or 0)}; "
                "save with a longer ttl_seconds, or without one"
            )
        return found

    async def linked_checkpoint(self, text: str) -> Checkpoint:
        """One that a signed link names, for whoever has the link; NotFound, or Gone."""
        found = await self.checkpoints.get(ids.checkpoint_key(ids.parse_path(text)))
        if found is None:
            raise _no_checkpoint(text)
        return await self.checkpoint(await self._owner_of(found), text)

    async def own_checkpoint(self, owner: str, path: ids.CheckpointPath) -> Checkpoint:
        """A checkpoint of ``owner``, expired or not; NotFound otherwise."""
        found = await self.checkpoints.get(ids.checkpoint_key(path))
        if found is None or await self._owner_of(found) != owner:
            raise _no_checkpoint(str(path))
        return found

    async def checkpoint_of_kind(
        self, owner: str, text: str, kind: str, use: str, *, token_owner: str | None = None
    ) -> Checkpoint:
        """As ``checkpoint``; InvalidRequest as well when it is not of the ``kind`` for ``use``."""
        if (given := ids.parse_path(text).kind) != kind:
            raise InvalidRequest(
                f"path: {text} is of kind {given!r}, but {use} needs {kind!r}; "
                f"make one with {MAKERS[kind]}"
            )
        return await self.checkpoint(owner, text, token_owner=token_owner)

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


def _no_checkpoint(text: str) -> NotFound:
    return NotFound(
        f"path: there is no checkpoint {text}; list those there are with "
        "RestClient.list_user_checkpoints"
    )
