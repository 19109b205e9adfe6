"""Sessions that are over when they begin: they hold runs that nobody trains here."""

from __future__ import annotations

import time

from tinsmith.messages.registry import Session


def closed_session(
    session_id: str, owner: str, made_for: str, *, project_id: str | None = None
) -> Session:
    """A session whose only run was made for ``made_for``, such as "a copy"."""
    now_ns = time.time_ns()
    return Session(
        session_id=session_id,
        owner=owner,
        created_ns=now_ns,
        status="finished",
        detail=f"made for {made_for}",
        finish_reason="success",
        ended_ns=now_ns,
        project_id=project_id,
    )
