"""Notes what owners do with their things, for them to read later."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import structlog

from tinsmith.errors import ServerError
from tinsmith.messages.services import AuditEntry

if TYPE_CHECKING:
    from typing import Literal

    from tinsmith_gateway.gateway import Gateway

log = structlog.get_logger(__name__)


async def record(
    gateway: Gateway,
    owner: str,
    event: str,
    details: dict[str, str],
    *,
    topic: Literal["checkpoints", "projects", "keys"] = "checkpoints",
) -> None:
    """Note something that has been done; a note that is lost is an error in the log only."""
    entry = AuditEntry(owner=owner, topic=topic, event=event, at_ns=time.time_ns(), details=details)
    try:
        await gateway.bus.audit.add(entry)
    except ServerError as error:
        log.error("not audited", audit_event=event, error=str(error), **details)  # noqa: TRY400
