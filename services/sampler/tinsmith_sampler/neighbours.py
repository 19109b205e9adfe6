"""Which shares of the work this sampler prefers, told from the samplers that are alive.

What is heard may be late or lost, and decides only who is asked first: a wrong guess costs an
adapter's load or a prompt's pass, and nothing else.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from tinsmith import pools
from tinsmith.bus import LOWEST

if TYPE_CHECKING:
    from collections.abc import Callable

    from tinsmith.messages.registry import ServedModel
    from tinsmith.messages.services import ServiceAlive

STALE_S = 10.0
"""A sampler that has been silent for so long is not reckoned with; it is also how long this one
listens before it believes that a pool has none."""
BUSY = (LOWEST + 1) // 2
"""Added to the priority of one that has no free rows: one that has comes before it."""


class Neighbours:
    """The samplers of one base model, this one among them."""

    def __init__(
        self, instance: str, base_model: str, pool: str, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._instance = instance
        self._base_model = base_model
        self._pool = pool
        self._clock = clock
        self._since = clock()
        self._others: dict[str, tuple[float, str]] = {}  # by instance: when it was heard, its pool
        self._pools = {pools.DEFAULT_POOL, pool}
        self._ranks: dict[str, int] = {}
        self._ranked: object = None  # what they were made of

    def heard(self, alive: ServiceAlive) -> None:
        """Any service's ping."""
        if alive.service != "sampler" or alive.instance == self._instance:
            return
        if alive.is_taking and self._base_model in alive.base_models:
            self._others[alive.instance] = self._clock(), alive.pool
        else:
            self._others.pop(alive.instance, None)

    def announced(self, _key: str, served: ServedModel | None) -> None:
        """A pool of some model, which may have requests when it has no sampler."""
        if served is not None and (served.name, served.role) == (self._base_model, "sampler"):
            self._pools.add(served.pool)

    def are_there(self) -> bool:
        """Whether another sampler takes work of this base model."""
        return bool(self._members())

    def priorities(self, *, is_busy: bool) -> dict[str, int]:
        """By share, of those that this one takes: its pool's, and those of pools without one."""
        members = self._members()
        is_settled = self._clock() - self._since >= STALE_S
        made_of = (frozenset(members.items()), frozenset(self._pools), is_settled)
        if made_of != self._ranked:
            self._ranked = made_of
            self._ranks = self._rank(members, is_settled=is_settled)
        extra = BUSY if is_busy else 0
        return {share: min(rank, BUSY - 1) + extra for share, rank in self._ranks.items()}

    def _rank(self, members: dict[str, str], *, is_settled: bool) -> dict[str, int]:
        ranks = {}
        for pool in self._pools:
            of_it = [one for one, its_pool in members.items() if its_pool == pool]
            if pool != self._pool and (of_it or not is_settled):
                continue
            rivals = of_it if pool == self._pool else list(members)
            for share in pools.shares(pool):
                ranks[share] = pools.rank(share, self._instance, rivals)
        return ranks

    def _members(self) -> dict[str, str]:
        oldest = self._clock() - STALE_S
        self._others = {one: told for one, told in self._others.items() if told[0] > oldest}
        return {one: pool for one, (_, pool) in self._others.items()}
