"""What a trainer tells of its work: how busy it is, and who waits for whom."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import TYPE_CHECKING

from tinsmith.messages.services import QueuePlace
from tinsmith.metrics import names as metrics

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinsmith.service import ServiceContext
    from tinsmith_trainer.compute import Compute

TELL_S = 1.0
LOG_EVERY = 60  # tellings
WINDOW = 10  # tellings


class BusyShare:
    """Which share of the time was spent computing, over a sliding window."""

    def __init__(self, clock: Callable[[], float], busy_s: Callable[[], float]) -> None:
        """``clock`` is monotonic; ``busy_s`` the seconds spent computing so far."""
        self._clock = clock
        self._busy_s = busy_s
        self._samples = deque([(clock(), busy_s())], maxlen=WINDOW)

    def sample(self) -> float:
        """From 0 to 1, since the oldest sample that is kept."""
        began, busy_before = self._samples[0]
        now, busy = self._clock(), self._busy_s()
        self._samples.append((now, busy))
        return min(1.0, (busy - busy_before) / (now - began)) if now > began else 0.0


async def tell(context: ServiceContext, compute: Compute) -> None:
    """Keep the figures of the liveness ping up to date until cancelled; log them now and then.

    ``busy`` is the share of the last ten seconds, ``busy_s`` and ``up_s`` count since the start,
    ``pause_ms`` is the longest that a model had to stop for being copied or digested.
    """
    clock = asyncio.get_running_loop().time
    share, began, count = BusyShare(clock, lambda: compute.busy_s), clock(), 0
    metrics.TURN_AGE.set_function(lambda: compute.turn_s)
    told_s = 0.0
    while True:
        await asyncio.sleep(TELL_S)
        count += 1
        context.places = {
            model_id: QueuePlace(turns=place.turns, tokens=place.tokens)
            for model_id, place in compute.places().items()
        }
        context.load |= {
            "busy": round(share.sample(), 3),
            "busy_s": round(compute.busy_s, 3),
            "up_s": round(clock() - began, 3),
            "waiting": len(context.places),
            "pause_ms": round(1e3 * compute.readings.longest_wait_s, 1),
        }
        metrics.BUSY_SHARE.set(context.load["busy"])
        metrics.BUSY_SECONDS.inc(max(0.0, context.load["busy_s"] - told_s))
        told_s = context.load["busy_s"]
        metrics.WAITING.set(len(context.places))
        if count % LOG_EVERY == 0:
            context.log.info("work", **context.load)
