"""The engine on an SGLang server: rows and scores as its requests, each under our own rules.

The server is a process beside this one, or one by URL, and may die at any moment. A row that was in
it then begins anew in the next start of it, with the same seed and so the same tokens.
"""

from __future__ import annotations

import asyncio
import platform
from contextlib import ExitStack, aclosing
from functools import partial
from typing import TYPE_CHECKING, TypeVar

import structlog

from tinsmith import __version__
from tinsmith.errors import InvalidRequest, NotSupported, ServerError
from tinsmith_sampler.engine import NO_EXPERTS, EngineLoad, Generated, Scored
from tinsmith_sampler.sglang import base_model, continuing, scoring
from tinsmith_sampler.sglang.adapters import Adapters
from tinsmith_sampler.sglang.continuing import Continuation
from tinsmith_sampler.sglang.failures import (
    SglangAborted,
    SglangError,
    SglangGone,
    SglangRefused,
)
from tinsmith_sampler.sglang.inspecting import inspect
from tinsmith_sampler.sglang.logprobs import NotFinite
from tinsmith_sampler.sglang.pending import Pending
from tinsmith_sampler.sglang.starts import Starts
from tinsmith_sampler.sglang.watching import watch
from tinsmith_sampler.tasks import not_finite

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    import numpy as np
    from numpy.typing import NDArray

    from tinsmith_sampler.engine import Row, Scoring
    from tinsmith_sampler.sglang.adapters import HeldAdapter
    from tinsmith_sampler.sglang.base_model import BaseModel
    from tinsmith_sampler.sglang.client import SglangClient
    from tinsmith_sampler.sglang.inspecting import Inspection
    from tinsmith_sampler.sglang.server import SglangServer

_log = structlog.get_logger(__name__)

T = TypeVar("T")

AHEAD = 2
"""Rows that the server has, for each that it can draw: none of its places waits for us."""
ATTEMPTS = 4
"""Failures of the server that one row may see, before it is the row that is to blame."""


class SglangEngine:
    """Engine on the server that ``new_server`` makes for the model in ``source``."""

    root: str = ""
    """Of the weights, where they are those of a lineage."""

    def __init__(
        self,
        source: str,
        new_server: Callable[[BaseModel], SglangServer],
        *,
        max_rows: int,
        max_rank: int,
        context_length: int | None = None,
        figures: dict[str, float] | None = None,
    ) -> None:
        """``figures`` gets what the server counts."""
        self._source = source
        self._new_server = new_server
        self._max_rows = max_rows
        self._max_rank = max_rank
        self._context_length = context_length
        self._figures = {} if figures is None else figures
        self._slots = asyncio.Semaphore(AHEAD * max_rows)
        self._pending = Pending()
        self._starts: Starts | None = None
        self._watching: asyncio.Task[None] | None = None

    @property
    def plane(self) -> str:
        """What computes the numbers."""
        found = self._found
        return f"sglang-{found.version}/{found.device}/{found.dtype}"

    @property
    def environment(self) -> dict[str, str]:
        """What decides the last bits."""
        return {
            "tinsmith": __version__,
            "python": platform.python_version(),
            "engine": "sglang",
            "sglang": self._found.version,
            "device": self._found.device,
            "dtype": self._found.dtype,
            "base_checksum": self._found.base_checksum,
            "context_length": str(self._found.context_length),
        }

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._model.vocab_size

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its continuation together."""
        return self._found.context_length

    @property
    def route_bytes(self) -> int:
        """Of the experts that one token is sent to; 0: there are none."""
        return 0 if self._model.mixture is None else self._model.mixture.token_bytes

    async def start(self) -> None:
        """Have a server that serves the model as promised; StartupError when there is none."""
        self._model = await asyncio.to_thread(base_model.read, self._source)
        self._adapters = Adapters(self._model, max_rank=self._max_rank)
        self._starts = Starts(self._new_server(self._model), self._inspect)
        try:
            self._found = await self._starts.first()
        except BaseException:
            await self.close()
            raise
        self._watching = asyncio.create_task(watch(self._starts, self._figures), name="figures")

    async def generate(self, row: Row) -> Generated:
        """Draw one continuation."""
        self._check(row.prompt, len(row.prompt) + row.max_tokens)
        if row.params.stop_strings and self._model.to_text is None:
            raise NotSupported(
                "stop: this model was given to the sampler without a tokenizer; "
                "use token ids in place of strings"
            )
        if row.routed_experts and self._model.mixture is None:
            raise NotSupported(NO_EXPERTS)
        return await self._serve(row, partial(self._draw, row))

    async def score(self, asked: Scoring) -> Scored:
        """Score a prompt."""
        self._check(asked.prompt, len(asked.prompt))
        scoring.check(asked)
        return await self._serve(asked, partial(self._score, asked))

    async def load_adapter(self, version: str, files: Mapping[str, bytes]) -> None:
        """Read and check an adapter, and load it into the server; InvalidRequest if it is bad."""
        if version in self._adapters:
            return
        adapter = await self._adapters.read(version, files)
        self._adapters.add(version, adapter)
        try:
            await self._until_answered(adapter, _loaded)
        except SglangRefused as problem:
            self._adapters.remove(version)
            raise InvalidRequest(
                f"adapter {version}: the SGLang server cannot load it: {problem.message}"
            ) from problem
        except BaseException:
            self._adapters.remove(version)
            raise

    async def unload_adapter(self, version: str) -> None:
        """Forget an adapter; the server does when the rows that have it have ended."""
        await self._adapters.unload(version)

    def abort(self, request_id: str) -> None:
        """End all rows of a request, here and in the server."""
        self._pending.abort(request_id)

    def load(self) -> EngineLoad:
        """How busy the engine is; what its server has beyond its rows counts as queued."""
        pending = len(self._pending)
        running = min(pending, self._max_rows)
        return EngineLoad(
            running=running,
            queued=pending - running,
            free_rows=max(0, self._max_rows - pending),
        )

    async def wait_ended(self) -> None:
        """Return when the engine has been closed; raise ServerError when its server is no more."""
        await self._running.wait_ended()

    async def close(self) -> None:
        """End the server; what is pending fails with ServerError."""
        self._pending.close("the sampler is shutting down; send the request again")
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.wait([self._watching])
        if self._starts is not None:
            await self._adapters.close()
            await self._starts.close()

    async def _serve(
        self, asked: Row | Scoring, work: Callable[[SglangClient, str | None], Awaitable[T]]
    ) -> T:
        adapter = None if asked.adapter is None else self._adapters.get(asked.adapter)
        with ExitStack() as held:
            if adapter is not None:
                held.enter_context(adapter.used())
            try:
                return await self._pending.run(asked.request_id, self._seated(adapter, work))
            except NotFinite:
                raise not_finite(asked.adapter) from None
            except SglangError as problem:
                raise ServerError(f"the SGLang server does not do it: {problem}") from problem

    async def _seated(
        self,
        adapter: HeldAdapter | None,
        work: Callable[[SglangClient, str | None], Awaitable[T]],
    ) -> T:
        async with self._slots:
            return await self._until_answered(adapter, work)

    async def _until_answered(
        self,
        adapter: HeldAdapter | None,
        work: Callable[[SglangClient, str | None], Awaitable[T]],
    ) -> T:
        """What ``work`` gives with the first client that does not fail under it."""
        lost: SglangClient | None = None
        for attempt in range(ATTEMPTS):
            client = await self._running.client(lost)
            try:
                if adapter is None:
                    return await work(client, None)
                await adapter.load(client)
                return await work(client, adapter.name)
            except (SglangGone, SglangAborted) as problem:
                _log.warning("begun_anew", attempt=attempt + 1, error=str(problem))
                lost = client
        raise ServerError(
            f"the SGLang server failed {ATTEMPTS} times under this request; send it again, and if "
            "that fails too, look at the server's log"
        )

    async def _draw(self, row: Row, client: SglangClient, adapter: str | None) -> Generated:
        if row.routed_experts and not self._running.newest.routed_experts:
            raise NotSupported(
                "return_routed_experts: the SGLang server was not started for it; set "
                "sampler.routed_experts = true, or start it with --enable-return-routed-experts"
            )
        body = continuing.body(row, self._model, adapter)
        growing = Continuation(row, self._model)
        if not continuing.needs_stream(row):
            growing.take(await client.generate(body))
            return growing.result()
        async with aclosing(client.stream(body)) as answers:
            async for answer in answers:
                drawn = growing.take(answer)
                if drawn is not None and row.tell is not None:
                    row.tell(drawn)
                is_going_on = answer.meta_info.finish_reason is None
                # Routes come with the server's own end of the row.
                if growing.is_ended and is_going_on and not row.routed_experts:
                    break  # leaving the stream ends the row in the server too
        return growing.result()

    async def _score(self, asked: Scoring, client: SglangClient, adapter: str | None) -> Scored:
        score = scoring.Score(asked)
        for part in score.parts():
            score.take(part, await client.generate(part.body(asked, adapter)))
        return score.result()

    async def _inspect(self, client: SglangClient) -> Inspection:
        return await inspect(
            client, self._model, max_rank=self._max_rank, context_length=self._context_length
        )

    @property
    def _running(self) -> Starts:
        if self._starts is None:
            raise ServerError("the engine was not started")
        return self._starts

    def _check(self, prompt: NDArray[np.int32], tokens: int) -> None:
        """The server would answer other tokens with nonsense, and cut what is too long."""
        if len(prompt) == 0 or int(prompt.min()) < 0 or int(prompt.max()) >= self.vocab_size:
            raise InvalidRequest(
                f"prompt: it is empty or has a token outside the vocabulary of {self.vocab_size}; "
                "encode with the tokenizer of this base model"
            )
        if tokens > self.context_length:
            raise InvalidRequest(
                f"prompt: with what is to be drawn it has {tokens} tokens, over the context length "
                f"of {self.context_length}; shorten it or lower max_tokens"
            )


async def _loaded(_: SglangClient, __: str | None) -> None:
    """Nothing is to be done with an adapter but to have it."""
