"""How long payloads of ended runs are kept: the settings, and what is due by them. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from tinsmith.config import Section

if TYPE_CHECKING:
    from tinsmith.messages.registry import Run, Session

FOREVER = "forever"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

Duration = Annotated[str, Meta(pattern=r"^(forever|[1-9][0-9]{0,6}[smhdw])$")]
"""``forever``, or a number and a unit: 90s, 30m, 12h, 30d, 8w."""


class RetentionConfig(Section, frozen=True, kw_only=True):
    """Settings of ``[retention]``; carried out by the checkpointer.

    Payloads are what was trained on and what came out, as the log has it. A run is forgotten
    when its session ended longer ago than this: see ``tinsmith log forget``.
    """

    payloads: Duration = FOREVER
    """How long payloads are kept after a run's session has ended: ``forever``, or a number and a
    unit, such as ``12h``, ``30d`` or ``8w``."""
    owners: dict[str, Duration] = {}  # noqa: RUF012 - msgspec copies it
    """The same for the runs of single owners, by their ids."""
    projects: dict[str, Duration] = {}  # noqa: RUF012 - msgspec copies it
    """The same for the runs of single projects, by their ids; goes before their owner's."""
    check_s: Annotated[float, Meta(gt=0)] = 600.0
    """How often it is looked whether something is due."""

    @property
    def is_needed(self) -> bool:
        """Whether anything is ever forgotten."""
        return any(
            text != FOREVER
            for text in (self.payloads, *self.owners.values(), *self.projects.values())
        )

    def kept_for(self, run: Run, session: Session | None) -> str:
        """The duration that holds for ``run``."""
        project = run.project_id or (session.project_id if session else None)
        if project is not None and project in self.projects:
            return self.projects[project]
        return self.owners.get(run.owner, self.payloads)


def seconds(duration: str) -> int | None:
    """``duration`` in seconds; None for ever."""
    if duration == FOREVER:
        return None
    number, unit = re.fullmatch(r"(\d+)([smhdw])", duration).groups()  # type: ignore[union-attr]
    return int(number) * _SECONDS[unit]


def why_due(
    config: RetentionConfig, run: Run, session: Session | None, *, now_ns: int
) -> str | None:
    """Why the payloads of ``run`` must be forgotten by ``now_ns``; None if they need not.

    Of a session that is not there any more it is only known that it ended after it had begun.
    """
    kept = config.kept_for(run, session)
    kept_s = seconds(kept)
    if kept_s is None or (session is not None and session.status == "active"):
        return None
    ended_ns = session.ended_ns if session else None
    since_ns = run.created_ns if ended_ns is None else ended_ns
    if now_ns - since_ns < kept_s * 10**9:
        return None
    return f"retention: {kept} after its session ended"
