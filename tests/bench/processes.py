"""What processes compute, as Linux counts it."""

from __future__ import annotations

import os
from pathlib import Path


def cpu_s(root):
    """CPU seconds so far of process ``root`` and of all that descend from it and still run."""
    ticks, children = {}, {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        try:
            fields = stat.read_text().rpartition(")")[2].split()
        except (FileNotFoundError, ProcessLookupError):
            continue  # it has ended since
        pid = int(stat.parent.name)
        ticks[pid] = int(fields[11]) + int(fields[12])
        children.setdefault(int(fields[1]), []).append(pid)
    total, waiting = 0, [root]
    while waiting:
        pid = waiting.pop()
        total += ticks.get(pid, 0)
        waiting += children.get(pid, [])
    return total / os.sysconf("SC_CLK_TCK")
