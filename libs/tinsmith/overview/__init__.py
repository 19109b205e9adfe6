"""What an installation looks like: gathered from pings, registry and broker, shown by others."""

from __future__ import annotations

from tinsmith.overview.facts import Overview, Problem
from tinsmith.overview.gathering import Watch, gather, measure, watching
from tinsmith.overview.known import Known
from tinsmith.overview.telling import tell

__all__ = ["Known", "Overview", "Problem", "Watch", "gather", "measure", "tell", "watching"]
