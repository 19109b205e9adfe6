"""Polls for results: held open until there is one, and told why there is none yet."""

from __future__ import annotations

import asyncio
import random
from contextlib import AsyncExitStack, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import structlog

from tinsmith import ids
from tinsmith.errors import BrokerUnavailable, NotFound
from tinsmith.messages.base import Failed
from tinsmith.messages.table import OP_DONE, SAMPLE_READY
from tinsmith_gateway.waiters import Waiters, wait_for
from tinsmith_gateway.wire import results

if TYPE_CHECKING:
    from tinsmith.bus import Bus
    from tinsmith.messages.ops import OpDone
    from tinsmith.messages.services import QueuePlace, SampleReady, ServiceAlive
    from tinsmith_gateway.config import GatewayConfig
    from tinsmith_gateway.liveness import Role, Services
    from tinsmith_gateway.unfinished import Unfinished
    from tinsmith_gateway.whereabouts import Whereabouts, Work
    from tinsmith_gateway.wire.results import Payload

log = structlog.get_logger(__name__)

LOOKS_AT_ONCE = 64  # thousands of polls must not stand in a heartbeat's way to the broker


@dataclass(frozen=True)
class Pending:
    """No result yet; ``reason`` is text for the user."""

    state: str  # "active", "paused_capacity" or "paused_rate_limit"
    reason: str | None = None


class Futures:
    """Answers polls."""

    def __init__(
        self,
        bus: Bus,
        whereabouts: Whereabouts,
        services: Services,
        unfinished: Unfinished,
        config: GatewayConfig,
    ) -> None:
        self._bus = bus
        self._whereabouts = whereabouts
        self._services = services
        self._counted = unfinished
        self._config = config
        self._subscriptions = AsyncExitStack()
        self._is_closing = False
        self._looks = asyncio.Semaphore(LOOKS_AT_ONCE)
        self._rechecked_at = 0.0
        self.waiters = Waiters()

    async def start(self) -> None:
        """Listens for results that have become ready."""
        for subscription in (
            await self._bus.listen(OP_DONE, self._on_op_done),
            await self._bus.listen(SAMPLE_READY, self._on_sample_ready),
        ):
            self._subscriptions.push_async_callback(subscription.close)

    def release(self) -> None:
        """Ends all waiting: held polls are answered as pending, the client asks another gateway."""
        self._is_closing = True
        self.waiters.wake_all()

    async def close(self) -> None:
        """Stops listening."""
        await self._subscriptions.aclose()

    async def poll(self, owner: str, request_id: str) -> Payload | Pending:
        """The answer when there is one, else Pending after at most ``long_poll_s``.

        Raises:
            InvalidRequest: not a request id.
            NotFound: nothing was asked for under this id, or not by ``owner``.
            ServerError: there is a result, but it cannot be read.
        """
        try:
            work = await self._whereabouts.of(owner, request_id)
        except BrokerUnavailable as error:
            return Pending("paused_capacity", str(error))
        with self.waiters.waiting(request_id) as woken:
            return await self._wait(work, woken)

    async def _wait(self, work: Work, woken: asyncio.Event) -> Payload | Pending:
        clock = asyncio.get_running_loop().time
        # Spread out: polls that came together would otherwise come back together for ever.
        deadline = clock() + self._config.long_poll_s * random.uniform(0.7, 1.0)
        trouble: Pending | None = None
        woken.set()
        while True:
            if woken.is_set() or trouble is not None:
                # Before the look: a ping that comes while the store is read is not lost.
                woken.clear()
                found = await self._look(work)
                if not (found is None or isinstance(found, Pending)):
                    return found
                trouble = found
            left_s = deadline - clock()
            if left_s <= 0 or self._is_closing:
                return trouble or await self._why_pending(work)
            await wait_for(woken, min(left_s, self._config.recheck_s))
            await self._wake_overlooked()

    async def _wake_overlooked(self) -> None:
        """Wakes the polls for what has left its queue, once for all of them.

        In case the pings that should have done so were lost: a look for each poll would keep
        thousands of them from being answered.
        """
        now = asyncio.get_running_loop().time()
        if now - self._rechecked_at < self._config.recheck_s or not self._bus.is_connected:
            return
        self._rechecked_at = now
        with suppress(BrokerUnavailable):  # the next one looks again
            queued = await self._counted.look()
            for request_id in self.waiters.request_ids() - queued.all:
                self.waiters.wake(request_id)

    async def _look(self, work: Work) -> Payload | Pending | None:
        """What is stored, None when there is nothing yet, or why that cannot be told."""
        try:
            async with self._looks:
                return await work.stored() or await self._check_queued(work)
        except BrokerUnavailable as error:
            # An error here would be polled again at once: waiting is kinder to all.
            return Pending("paused_capacity", str(error))

    async def _why_pending(self, work: Work) -> Payload | Pending:
        if not self._bus.is_connected:
            return Pending("paused_capacity", "the message broker cannot be reached")
        try:
            return await self._unfinished(work)
        except BrokerUnavailable as error:
            return Pending("paused_capacity", str(error))

    async def _check_queued(self, work: Work) -> Payload | None:
        """NotFound when the work is neither queued nor done."""
        if self._counted.is_counted(work.request_id) or await work.is_queued():
            return None
        # It may have been finished between the two looks.
        if (found := await work.stored()) is not None:
            return found
        raise NotFound(
            f"request_id: nothing is known of {work.request_id}: it was never asked for, "
            "or its result has expired; send the request again"
        )

    async def _unfinished(self, work: Work) -> Payload | Pending:
        silent_s = self._services.silent_s(work.role, work.base_model)
        # A training request stays queued and is carried out whenever a trainer comes: to call it
        # failed would be wrong then.
        if work.role == "sampler" and silent_s > self._config.no_worker_timeout_s:
            message = (
                f"no {work.role} has served {work.base_model!r} for {silent_s:.0f} s "
                f"(limit {self._config.no_worker_timeout_s:g} s); "
                f"start one, or ask the operator of this server to"
            )
            log.error("no worker", request=work.request_id, role=work.role, model=work.base_model)
            return results.failed(Failed(category="server", message=message))
        if silent_s > self._config.service_stale_s:
            return Pending(
                "paused_capacity",
                f"no {work.role} for model {work.base_model!r} is running; waiting for one",
            )
        if (reason := self._counted.why_held(work.request_id)) is not None:
            return Pending("paused_rate_limit", reason)
        if (reason := await self._why_held_up(work)) is not None:
            return Pending("paused_capacity", reason)
        return Pending("active")

    async def _why_held_up(self, work: Work) -> str | None:
        """What those who are there cannot do anything about, in words for the user."""
        alive = self._services.serving(work.role, work.base_model, self._config.service_stale_s)
        if (trouble := _trouble(work.role, alive)) is not None:
            return trouble
        model_id = ids.parse_future_id(work.request_id).target
        if places := [p for one in alive if (p := one.places.get(model_id)) is not None]:
            return _why_queued(places[0])
        has_room = [one for one in alive if one.load.get("room", 1) > 0]
        if work.role != "trainer" or not alive or has_room:
            return None
        owner = await self._bus.log.owner(model_id)
        if owner is not None and owner.trainer_id in {one.instance for one in alive}:
            return None
        models = sum(int(one.load.get("models", 0)) for one in alive)
        return (
            f"every trainer of {work.base_model!r} is full ({len(alive)} running, with {models} "
            "models); this model waits until another is released or a trainer is added"
        )

    def _on_op_done(self, done: OpDone) -> None:
        self.waiters.wake(ids.future_id(done.model_id, done.seq))

    def _on_sample_ready(self, ready: SampleReady) -> None:
        self.waiters.wake(ready.request_id)


def _trouble(role: Role, alive: list[ServiceAlive]) -> str | None:
    """A model has one trainer, any of them; its samples go to any sampler that is all right."""
    told = [one.trouble for one in alive if one.trouble]
    return told[0] if told and (role == "trainer" or len(told) == len(alive)) else None


def _why_queued(place: QueuePlace) -> str | None:
    if not place.turns:
        return None
    return (
        f"the trainer is busy with other models: {place.turns} of their turns "
        f"({place.tokens} tokens) come before the next one of this model"
    )
