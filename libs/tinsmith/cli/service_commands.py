"""Commands that a service brings: its packages are imported when one is asked for."""

from __future__ import annotations

from importlib import metadata
from typing import TYPE_CHECKING, Any

from tinsmith.cli.foreground import require_extra

if TYPE_CHECKING:
    from collections.abc import Callable

ENTRY_POINTS = "tinsmith.commands"


def load(name: str, *, extra: str) -> Callable[..., Any]:
    """The command called ``name``; StartupError when ``tinsmith[extra]`` is not installed."""
    require_extra(extra)
    (point,) = metadata.entry_points(group=ENTRY_POINTS, name=name)
    command: Callable[..., Any] = point.load()
    return command
