"""Sampling sessions for those who come without one: a session for each owner, samplers in it.

They are this gateway's: another one opens its own. A session that nobody uses ends by itself.
"""

from __future__ import annotations

import asyncio
import time
from itertools import count
from typing import TYPE_CHECKING, NamedTuple

from tinsmith import ids
from tinsmith.messages.registry import Sampler
from tinsmith_gateway.wire.requests import CreateSession

if TYPE_CHECKING:
    from collections.abc import Iterator

    from tinsmith.messages.registry import Session
    from tinsmith_gateway.openai.sources import Source
    from tinsmith_gateway.registry import Registry
    from tinsmith_gateway.sessions import Sessions

_OPENED_BY = CreateSession(sdk_version="openai", display_name="OpenAI routes", tags=("openai",))


class Seat(NamedTuple):
    """A sampler, and the numbers of its requests."""

    sampler: Sampler
    numbers: Iterator[int]


class _Stay:
    """An owner's session."""

    def __init__(self, session: Session) -> None:
        self.session = session
        self.seats: dict[tuple[str, str | None, str], Seat] = {}


class Guests:
    """Who is here."""

    def __init__(self, registry: Registry, sessions: Sessions) -> None:
        self._registry = registry
        self._sessions = sessions
        self._stays: dict[str, _Stay] = {}
        self._opening = asyncio.Lock()

    async def seat(self, owner: str, source: Source) -> Seat:
        """Where ``owner`` samples from ``source``. Raises BrokerUnavailable."""
        async with self._opening:
            stay = await self._stay(owner)
            version = "" if source.adapter is None else source.adapter.version
            key = (source.base_model, source.path, version)
            if key not in stay.seats:
                stay.seats[key] = await self._new_seat(owner, stay, source)
            return stay.seats[key]

    async def is_here(self, owner: str) -> None:
        """A sign of life of an owner whose request is being served, for all gateways."""
        if (stay := self._stays.get(owner)) is not None:
            await self._sessions.heartbeat(stay.session)

    async def _stay(self, owner: str) -> _Stay:
        stay = self._stays.get(owner)
        if stay is not None:
            now = self._registry.session_now(stay.session.session_id)
            if now is None or now.status == "active":
                await self._sessions.heartbeat(stay.session)
                return stay
        stay = self._stays[owner] = _Stay(await self._sessions.open(owner, _OPENED_BY))
        return stay

    async def _new_seat(self, owner: str, stay: _Stay, source: Source) -> Seat:
        session_id = stay.session.session_id
        sampler = Sampler(
            sampler_id=ids.sampler_id(session_id, len(stay.seats)),
            session_id=session_id,
            owner=owner,
            created_ns=time.time_ns(),
            base_model=source.base_model,
            model_path=source.path,
            adapter=source.adapter,
        )
        key = ids.token(sampler.sampler_id)
        await self._registry.samplers.table.create(key, sampler)
        return Seat(sampler, count())
