"""What samplers tell this gateway about requests whose clients are connected."""

from __future__ import annotations

import asyncio
import secrets
from contextlib import AsyncExitStack, contextmanager
from typing import TYPE_CHECKING

from tinsmith.messages.table import SAMPLE_READY, TOKENS_DRAWN

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from tinsmith.bus import Bus
    from tinsmith.messages.sampling import TokensDrawn
    from tinsmith.messages.services import SampleReady

    News = TokensDrawn | SampleReady


class Inbox:
    """Sorts news by request; those of requests that nobody listens for are dropped."""

    def __init__(self, bus: Bus) -> None:
        self.address = secrets.token_hex(8)
        """What samplers are given: a token of the subject that they send to."""
        self._bus = bus
        self._listening: dict[str, asyncio.Queue[News]] = {}
        self._subscriptions = AsyncExitStack()

    async def start(self) -> None:
        """Listens."""
        for subscription in (
            await self._bus.listen(TOKENS_DRAWN, self._on_news, gateway=self.address),
            await self._bus.listen(SAMPLE_READY, self._on_news),
        ):
            self._subscriptions.push_async_callback(subscription.close)

    async def close(self) -> None:
        """Stops listening."""
        await self._subscriptions.aclose()

    @contextmanager
    def listening(self, request_ids: Iterable[str]) -> Iterator[asyncio.Queue[News]]:
        """Inside the block, news of these requests in the order in which they came."""
        news: asyncio.Queue[News] = asyncio.Queue()
        entered = dict.fromkeys(request_ids, news)
        self._listening |= entered
        try:
            yield news
        finally:
            for request_id in entered:
                del self._listening[request_id]

    def _on_news(self, news: News) -> None:
        if (queue := self._listening.get(news.request_id)) is not None:
            queue.put_nowait(news)
