"""How many CPU threads a service computes with."""

from __future__ import annotations

import os


def threads(configured: int) -> int:
    """As configured; 0 means half of the cores, since trainer and sampler share a machine.

    More threads than free cores cost far more than they bring: OpenMP spins while it waits.
    """
    return configured or max(1, (os.cpu_count() or 2) // 2)
