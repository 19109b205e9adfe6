"""The starts of a server: each is looked at before its use, and must be as the first one was."""

from __future__ import annotations

import asyncio
from typing import TYPE_CHECKING

import structlog

from tinsmith.errors import ServerError, StartupError
from tinsmith_sampler.sglang.failures import SglangError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from tinsmith_sampler.sglang.client import SglangClient
    from tinsmith_sampler.sglang.inspecting import Inspection
    from tinsmith_sampler.sglang.server import SglangServer

    Inspect = Callable[[SglangClient], Awaitable[Inspection]]

_log = structlog.get_logger(__name__)

_AGAIN_S = 0.5  # between two looks whether a server that failed is there, or another
_LOOKS = 600  # then it is neither ended nor does it answer


class Starts:
    """Clients of one server that may be used. All methods belong to one event loop."""

    def __init__(self, server: SglangServer, inspect: Inspect) -> None:
        self._server = server
        self._inspect = inspect
        self.newest: Inspection
        """Of the start that was looked at last."""
        self._client: SglangClient | None = None  # of the start that was looked at last
        self._looking = asyncio.Lock()
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    async def first(self) -> Inspection:
        """Start the server and look at it; StartupError when it cannot be used."""
        client = await self._server.start()
        try:
            self.newest = await self._inspect(client)
        except SglangError as problem:
            raise StartupError(f"sglang: the server cannot be used: {problem}") from problem
        self._client = client
        return self.newest

    async def client(self, lost: SglangClient | None = None) -> SglangClient:
        """The client of a server that runs; of ``lost`` only if that one answers again.

        Raises:
            ServerError: there will be none.
        """
        for _ in range(_LOOKS):
            if self._failed.done():
                self._failed.result()
            client = await self._server.current()
            if client is lost and not await client.health():
                await asyncio.sleep(_AGAIN_S)
            elif client is self._client or await self._is_usable(client):
                return client
        error = ServerError("SGLang has not ended and does not answer; restart the sampler")
        self._fail(error)
        raise error

    async def wait_ended(self) -> None:
        """Return when the server was closed; raise ServerError when there will be none."""
        ended = asyncio.create_task(self._server.wait_ended(), name="sglang server ends")
        try:
            done, _ = await asyncio.wait({ended, self._failed}, return_when=asyncio.FIRST_COMPLETED)
            for one in done:
                one.result()
        finally:
            ended.cancel()

    async def close(self) -> None:
        """End the server."""
        await self._server.close()

    async def _is_usable(self, client: SglangClient) -> bool:
        """Whether a new start is as the first one was; False when it has ended already."""
        async with self._looking:
            if client is self._client:
                return True
            try:
                found = await self._inspect(client)
            except SglangError as problem:
                _log.warning("sglang_lost", error=str(problem))
                await asyncio.sleep(_AGAIN_S)
                return False
            except StartupError as problem:
                self._fail(ServerError(f"after a restart: {problem}"))
                raise ServerError(str(problem)) from problem
            if found != self.newest:
                error = ServerError(
                    f"sglang: after a restart the server is {found}, before it was {self.newest}; "
                    "restart the sampler to serve it as it is now"
                )
                self._fail(error)
                raise error
            self.newest, self._client = found, client
            return True

    def _fail(self, error: ServerError) -> None:
        if not self._failed.done():
            self._failed.set_exception(error)
            self._failed.exception()  # seen, should nobody wait for it
