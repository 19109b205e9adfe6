"""Clients' sessions: their signs of life, and how they end.

When a session was last heard of is kept in memory only. Every gateway hears of every heartbeat,
and one that has heard nothing yet waits for the whole timeout.
"""

from __future__ import annotations

import asyncio
import time
from typing import TYPE_CHECKING

import structlog
from msgspec import structs

from tinsmith import ids
from tinsmith.errors import BrokerUnavailable, Gone
from tinsmith.messages.registry import Session
from tinsmith.messages.services import SessionAlive
from tinsmith.messages.table import SESSION_ALIVE
from tinsmith_gateway.wire.labels import check_metadata, check_project

if TYPE_CHECKING:
    from typing import Literal

    from tinsmith.bus import Bus
    from tinsmith.bus.views import View
    from tinsmith_gateway.liveness import Hearing
    from tinsmith_gateway.wire.requests import CreateSession

log = structlog.get_logger(__name__)


class Sessions:
    """Opens, hears of, and ends sessions."""

    def __init__(
        self, bus: Bus, view: View[Session], hearing: Hearing, *, timeout_s: float
    ) -> None:
        self._bus = bus
        self._view = view
        self._hearing = hearing
        self._timeout_s = timeout_s
        self._heard: dict[str, float] = {}
        self.some_ended = asyncio.Event()
        """Set when a session has ended here, for whoever cleans up behind it."""

    async def open(self, owner: str, asked: CreateSession) -> Session:
        """A new session of ``owner``; InvalidRequest when what it is to be told by is too much."""
        check_metadata(asked.user_metadata or {})
        told = {"tags": asked.tags, "sdk_version": asked.sdk_version, "name": asked.display_name}
        check_metadata(told, "tags, sdk_version, display_name")
        session = Session(
            session_id=ids.new_session_id(),
            owner=owner,
            created_ns=time.time_ns(),
            sdk_version=asked.sdk_version,
            display_name=asked.display_name,
            tags=asked.tags,
            user_metadata=asked.user_metadata or {},
            project_id=check_project(asked.project_id) if asked.project_id else None,
        )
        self.touch(session.session_id)
        await self._view.table.put(ids.token(session.session_id), session)
        return session

    def touch(self, session_id: str) -> None:
        """A sign of life, from the client itself or told by another gateway."""
        self._heard[session_id] = self._hearing.clock()

    def check_active(self, session: Session) -> None:
        """Gone when the session has ended; else its use is a sign of life."""
        if session.status != "active":
            raise Gone(
                f"session_id: {session.session_id} has ended ({session.status}"
                f"{': ' if session.detail else ''}{session.detail}); create a new ServiceClient"
            )
        self.touch(session.session_id)

    async def heartbeat(self, session: Session) -> None:
        """The client's own sign of life, passed on to the other gateways; Gone as above."""
        self.check_active(session)
        await self._bus.emit(SESSION_ALIVE, SessionAlive(session_id=session.session_id))

    async def end(
        self,
        session: Session,
        status: Literal["finished", "expired"],
        detail: str,
        *,
        reason: str = "",
    ) -> None:
        """Ends a session; of several ends the first stays."""
        if session.status == "active":
            ended = structs.replace(
                session,
                status=status,
                detail=detail,
                finish_reason=reason,
                ended_ns=time.time_ns(),
            )
            key = ids.token(session.session_id)
            await self._view.table.put(key, ended)
            self._view.apply(key, ended)  # the watch tells of it a little later
            self.some_ended.set()
        self._heard.pop(session.session_id, None)

    async def expire_silent(self) -> None:
        """Ends every session that has been silent for too long."""
        for session in self._view:
            if session.status == "active" and self._is_silent(session.session_id):
                await self._expire(session)
        # To have been heard of so long ago is the same as never.
        oldest = self._hearing.clock() - self._timeout_s
        self._heard = {key: heard for key, heard in self._heard.items() if heard >= oldest}

    def _is_silent(self, session_id: str) -> bool:
        return self._hearing.silent_s(self._heard.get(session_id)) > self._timeout_s

    async def _expire(self, session: Session) -> None:
        detail = f"no sign of life for {self._timeout_s:g} s"
        try:
            await self.end(session, "expired", detail)
        except BrokerUnavailable as error:
            # The next round tries again; while the broker is away nobody can be heard anyway.
            log.warning("session not expired", session_id=session.session_id, error=str(error))
        else:
            log.info("session expired", session_id=session.session_id, detail=detail)
