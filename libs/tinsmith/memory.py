"""Whether a model will fit: how much memory is free, and the refusal when that is too little."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Mapping

GIB = 1 << 30

_MEMINFO = Path("/proc/meminfo")
_CGROUP = Path("/sys/fs/cgroup")


def available_bytes(meminfo: Path = _MEMINFO, cgroup: Path = _CGROUP) -> int | None:
    """Main memory that this process may still take; None where the system does not tell.

    In a container, its own limit counts as well.
    """
    try:
        lines = meminfo.read_text().splitlines()
    except OSError:
        return None
    free = next((int(line.split()[1]) * 1024 for line in lines if "MemAvailable" in line), None)
    limit, used = _number(cgroup / "memory.max"), _number(cgroup / "memory.current")
    if free is None or limit is None or used is None:
        return free
    return min(free, max(0, limit - used + _reclaimable(cgroup / "memory.stat")))


def check_room(
    model: str, needs: Mapping[str, int], available: int | None, *, place: str, remedy: str
) -> None:
    """Raises StartupError, with every figure, when the ``needs`` (bytes) exceed ``available``."""
    need = sum(needs.values())
    if available is None or need <= available:
        return
    parts = ", ".join(f"{size / GIB:.2f} GiB {what}" for what, size in needs.items())
    raise StartupError(
        f"model: {model} needs about {need / GIB:.2f} GiB ({parts}), and {place} has "
        f"{available / GIB:.2f} GiB free; {remedy}"
    )


def _number(file: Path) -> int | None:
    """What a file of the control group holds; None for "max", and where there is none."""
    try:
        return int(file.read_text())
    except (OSError, ValueError):
        return None


def _reclaimable(stat: Path) -> int:
    """Cached files count as used, but give way."""
    try:
        entries = dict(line.split() for line in stat.read_text().splitlines())
        return sum(int(entries.get(key, 0)) for key in ("active_file", "inactive_file"))
    except (OSError, ValueError):
        return 0
