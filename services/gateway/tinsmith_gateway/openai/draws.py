"""Samples that a connected client waits for: sent, followed, and cancelled when it goes away."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING

from tinsmith.errors import BrokerUnavailable, Gone, NoResponder
from tinsmith.messages.failures import to_exception
from tinsmith.messages.sampling import SampleDone, SampleFailed, TokensDrawn
from tinsmith_gateway.cancelling import cancel_sample

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence

    from tinsmith.messages.sampling import Sample
    from tinsmith_gateway.gateway import Gateway
    from tinsmith_gateway.openai.inbox import News

LOOK_S = 0.5  # how often a quiet request is looked after: is its client still there?


class Draws:
    """The samples of one HTTP request; one for each prompt."""

    def __init__(self, gateway: Gateway, owner: str, samples: Sequence[Sample]) -> None:
        self._gateway = gateway
        self._owner = owner
        self._samples = {one.request_id: one for one in samples}
        self._places = {one.request_id: place for place, one in enumerate(samples)}
        self._unfinished: dict[str, Sample] = {}

    @asynccontextmanager
    async def sent(self) -> AsyncIterator[asyncio.Queue[News]]:
        """Inside the block they are drawn; those that are not done at its end are cancelled.

        Raises Busy when the queue is full, or its owner has too much in it.
        """
        with self._gateway.openai.inbox.listening(self._samples) as news:
            try:
                for sample in self._samples.values():
                    await self._send(sample)
                yield news
            finally:
                for sample in self._unfinished.values():
                    await self._cancel(sample)

    async def follow(
        self, news: asyncio.Queue[News], is_gone: Callable[[], bool]
    ) -> AsyncGenerator[tuple[int, TokensDrawn | SampleDone]]:
        """What is heard of each prompt, by its place; ends when all are done.

        Raises:
            Gone: the client went away.
            NoResponder: no sampler has served the model for too long.
            TinsmithError: the one that a sample failed with.
        """
        clock = asyncio.get_running_loop().time
        recheck_at = clock()
        while self._unfinished:
            heard = await _next(news)
            if isinstance(heard, TokensDrawn):
                yield self._places[heard.request_id], heard
                continue
            if is_gone():
                raise Gone("the client went away")
            if heard is None and clock() < recheck_at:
                continue
            waiting = tuple(self._unfinished) if heard is None else (heard.request_id,)
            for request_id in waiting:
                if (done := await self._look(request_id)) is not None:
                    yield self._places[request_id], done
            if heard is None:
                self._check_served()
                await self._gateway.openai.guests.is_here(self._owner)
                recheck_at = clock() + self._gateway.config.recheck_s

    async def _send(self, sample: Sample) -> None:
        self._unfinished[sample.request_id] = sample
        await self._gateway.holding.send(self._owner, sample)

    async def _cancel(self, sample: Sample) -> None:
        with suppress(BrokerUnavailable):  # then it is drawn in vain
            await cancel_sample(
                self._gateway.bus,
                sample.base_model,
                sample.sampler_id,
                sample.seq,
                owner=self._owner,
            )
        self._gateway.unfinished.done(sample.request_id)

    async def _look(self, request_id: str) -> SampleDone | None:
        sample = self._unfinished.get(request_id)
        if sample is None:
            return None
        try:
            result = await self._gateway.bus.results.get(sample.sampler_id, sample.seq)
        except BrokerUnavailable:
            result = None  # the broker comes back, and the next look finds it
        if result is None:
            return None
        del self._unfinished[request_id]
        if isinstance(result, SampleFailed):
            raise to_exception(result.failure)
        return result

    def _check_served(self) -> None:
        base_model = next(iter(self._samples.values())).base_model
        silent_s = self._gateway.services.silent_s("sampler", base_model)
        if silent_s > (limit_s := self._gateway.config.no_worker_timeout_s):
            raise NoResponder(
                f"no sampler has served {base_model!r} for {silent_s:.0f} s (limit {limit_s:g} s); "
                "start one, or ask the operator of this server to"
            )


async def _next(news: asyncio.Queue[News]) -> News | None:
    """The next there is; None after a while."""
    try:
        async with asyncio.timeout(LOOK_S):
            return await news.get()
    except TimeoutError:
        return None
