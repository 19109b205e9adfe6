"""Where a process tells how it is."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tinsmith.config import Section


class MetricsConfig(Section, frozen=True, kw_only=True):
    """The listener of each process for ``/metrics``, ``/healthz`` and ``/readyz``."""

    enabled: bool = True
    """Whether there is one."""
    host: str = "127.0.0.1"
    """Address to listen on. No key is asked for: what others can reach should be in a network of
    the operator's."""
    port: Annotated[int, Meta(ge=0, le=65535)] = 0
    """TCP port; 0 lets the system choose. Processes that ``tinsmith up`` or ``--workers`` start
    take this one and those after it, in the order of their labels."""
