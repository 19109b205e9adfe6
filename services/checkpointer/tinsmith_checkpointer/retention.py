"""How long payloads and logs of ended runs are kept: the settings, and what is due. Pure."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated

from msgspec import Meta

from tinsmith.config import Section

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinsmith.messages.registry import Run, Session

FOREVER = "forever"
_SECONDS = {"s": 1, "m": 60, "h": 3600, "d": 86400, "w": 604800}

Duration = Annotated[str, Meta(pattern=r"^(forever|[1-9][0-9]{0,6}[smhdw])$")]
"""``forever``, or a number and a unit: 90s, 30m, 12h, 30d, 8w."""


class RetentionConfig(Section, frozen=True, kw_only=True):
    """Settings of ``[retention]``; carried out by the checkpointer.

    Payloads are what was trained on and what came out, as the log has it. A run is forgotten
    when its session ended longer ago than this: see ``tinsmith log forget``. Its whole log can be
    pruned as well: see ``docs/audit.md``.
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
    logs: Duration = FOREVER
    """How long logs are kept, in the same way. What is due is taken off the broker, unless a
    checkpoint or a living session needs it: entries, samples, and published weights."""
    log_owners: dict[str, Duration] = {}  # noqa: RUF012 - msgspec copies it
    """``logs`` for the runs of single owners."""
    log_projects: dict[str, Duration] = {}  # noqa: RUF012 - msgspec copies it
    """``logs`` for the runs of single projects; goes before their owner's."""

    @property
    def is_needed(self) -> bool:
        """Whether payloads are ever forgotten."""
        return _ends(self.payloads, self.owners, self.projects)

    @property
    def prunes(self) -> bool:
        """Whether logs are ever pruned."""
        return _ends(self.logs, self.log_owners, self.log_projects)

    def kept_for(self, run: Run, session: Session | None) -> str:
        """The duration that holds for the payloads of ``run``."""
        return self._duration(run, session, self.payloads, self.owners, self.projects)

    def logs_kept_for(self, run: Run, session: Session | None) -> str:
        """The duration that holds for the log of ``run``."""
        return self._duration(run, session, self.logs, self.log_owners, self.log_projects)

    @staticmethod
    def _duration(
        run: Run,
        session: Session | None,
        default: str,
        owners: Mapping[str, str],
        projects: Mapping[str, str],
    ) -> str:
        project = run.project_id or (session.project_id if session else None)
        if project is not None and project in projects:
            return projects[project]
        return owners.get(run.owner, default)


def seconds(duration: str) -> int | None:
    """``duration`` in seconds; None for ever."""
    if duration == FOREVER:
        return None
    number, unit = re.fullmatch(r"(\d+)([smhdw])", duration).groups()  # type: ignore[union-attr]
    return int(number) * _SECONDS[unit]


def why_due(
    config: RetentionConfig, run: Run, session: Session | None, *, now_ns: int
) -> str | None:
    """Why the payloads of ``run`` must be forgotten by ``now_ns``; None if they need not."""
    kept = config.kept_for(run, session)
    return _reason("retention", kept) if _is_over(kept, run, session, now_ns) else None


def why_prunable(
    config: RetentionConfig, run: Run, session: Session | None, *, now_ns: int
) -> str | None:
    """Why the log of ``run`` is not kept by ``now_ns``; None if it is."""
    kept = config.logs_kept_for(run, session)
    return _reason("retention of logs", kept) if _is_over(kept, run, session, now_ns) else None


def _is_over(kept: str, run: Run, session: Session | None, now_ns: int) -> bool:
    """Of a session that is not there any more it is only known that it ended after it began."""
    kept_s = seconds(kept)
    if kept_s is None or (session is not None and session.status == "active"):
        return False
    ended_ns = session.ended_ns if session else None
    since_ns = run.created_ns if ended_ns is None else ended_ns
    return now_ns - since_ns >= kept_s * 10**9


def _reason(what: str, kept: str) -> str:
    return f"{what}: {kept} after its session ended"


def _ends(default: str, owners: Mapping[str, str], projects: Mapping[str, str]) -> bool:
    return any(text != FOREVER for text in (default, *owners.values(), *projects.values()))
