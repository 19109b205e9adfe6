"""Servers that an engine can count on: one of our own that is kept running, or one that is given.

Both hand out a client for each start of the server. A new client means a new server: it has the
base model and no adapters.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Protocol

import structlog

from tinsmith.errors import ConfigError, ServerError, StartupError
from tinsmith_sampler.sglang import launching
from tinsmith_sampler.sglang.client import SglangClient
from tinsmith_sampler.sglang.failures import SglangError, SglangGone, SglangRefused
from tinsmith_sampler.sglang.process import ServerProcess

if TYPE_CHECKING:
    from collections.abc import Coroutine
    from pathlib import Path

    from tinsmith_sampler.sglang.launching import SglangOptions
    from tinsmith_sampler.sglang.wire import ServerInfo

BACKOFF_S = (1.0, 5.0, 15.0, 60.0)  # before each attempt to start it anew; then it is given up
STEADY_S = 300.0  # a server that ran for so long has all attempts again
POLL_S = 5.0  # of a given server, which no process tells about
LEAVE_S = 10.0  # requests that we gave up may still run with our adapters
ABSENT_S = 600.0  # a given server may be away for so long, e.g. while its owner restarts it

_log = structlog.get_logger(__name__)


class SglangServer(Protocol):
    """A server that comes back. All methods belong to one event loop."""

    async def start(self) -> SglangClient:
        """Wait until it is there; StartupError when it cannot be."""

    async def current(self) -> SglangClient:
        """The client of the server that runs now, or soon; ServerError when there will be none."""

    async def wait_ended(self) -> None:
        """Return when it was closed; raise ServerError when it is given up."""

    async def close(self) -> None:
        """End it if it is ours. Idempotent."""


class _Kept:
    """What servers have in common: the client there is now, who sees to it, and the end of all."""

    def __init__(self) -> None:
        self._client: asyncio.Future[SglangClient] = asyncio.Future()
        self._ended: asyncio.Future[None] = asyncio.Future()
        self._keeping: asyncio.Task[None] | None = None

    async def current(self) -> SglangClient:
        """The client of the server that runs, once it does."""
        return await asyncio.shield(self._client)

    async def wait_ended(self) -> None:
        """Return when it was closed; raise ServerError when it stays away, or cannot be kept."""
        await asyncio.shield(self._ended)

    def _keep_by(self, keeping: Coroutine[Any, Any, None]) -> None:
        self._keeping = asyncio.create_task(keeping, name="sglang server")

    async def _stop_keeping(self) -> None:
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.gather(self._keeping, return_exceptions=True)

    @property
    def _there(self) -> SglangClient | None:
        """The client, unless the server is away or given up."""
        is_there = self._client.done() and self._client.exception() is None
        return self._client.result() if is_there else None

    def _up(self, client: SglangClient) -> None:
        self._down()
        self._client.set_result(client)

    def _down(self) -> None:
        if self._client.done():
            self._client = asyncio.Future()

    def _end(self, error: ServerError | None = None) -> None:
        if self._ended.done():
            return
        self._down()
        self._client.set_exception(error or ServerError("the sampler is shutting down"))
        self._client.exception()  # seen, should nobody wait for it
        if error is None:
            self._ended.set_result(None)
        else:
            self._ended.set_exception(error)
            self._ended.exception()


class OwnServer(_Kept):
    """A server on this machine that we start, start anew when it dies, and end."""

    def __init__(self, options: SglangOptions, log: Path) -> None:
        """``log`` gets what the server writes."""
        super().__init__()
        self._options = options
        self._log = log
        self._process = ServerProcess(options, log)

    @property
    def pid(self) -> int:
        """Process id of the server that was started last; also that of its group."""
        return self._process.pid

    async def start(self) -> SglangClient:
        """Start it; StartupError when it ends instead, or its interpreter has no SGLang."""
        await asyncio.to_thread(launching.check_python, self._options.python)
        try:
            client = await self._process.start()
        except BaseException:
            await self._process.end()
            raise
        self._up(client)
        self._keep_by(self._keep())
        return client

    async def close(self) -> None:
        """End the server, all of it."""
        await self._stop_keeping()
        await self._process.end()
        self._end()

    async def _keep(self) -> None:
        loop = asyncio.get_running_loop()
        try:
            while True:
                since = loop.time()
                code = await self._process.wait()
                self._down()
                _log.error("sglang_died", code=code, log=str(self._log))
                is_steady = loop.time() - since >= STEADY_S
                self._up(await self._start_anew(BACKOFF_S if is_steady else BACKOFF_S[1:]))
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for ever
            self._end(_given_up(error))

    async def _start_anew(self, backoff_s: tuple[float, ...]) -> SglangClient:
        for delay_s in backoff_s:
            await self._process.end()
            await asyncio.sleep(delay_s)
            self._process = ServerProcess(self._options, self._log)
            try:
                return await self._process.start()
            except StartupError as error:
                _log.warning("sglang_not_started", error=str(error))
        raise ServerError(
            f"SGLang died and could not be started again in {len(backoff_s)} attempts; "
            f"{self._process.last_words()}"
        )


class GivenServer(_Kept):
    """A server that somebody else runs, at a URL. It is never ended by us."""

    def __init__(self, url: str, *, key: str = "") -> None:
        """``key`` is its ``--api-key``."""
        super().__init__()
        self._url = url
        self._key = key

    async def start(self) -> SglangClient:
        """Reach it and check what it is; ConfigError says what is wrong."""
        client = SglangClient(self._url, key=self._key)
        try:
            info = await client.server_info()
            check_given(info, self._url)
        except (SglangGone, SglangRefused) as error:
            await client.close()
            raise StartupError(
                f"sampler.sglang_url: {self._url} cannot be used: {error}; check the address and "
                "the key, and that the server is running"
            ) from error
        except BaseException:
            await client.close()
            raise
        self._up(client)
        self._keep_by(self._keep(client, info))
        return client

    async def close(self) -> None:
        """Leave it alone from now on, and without our adapters: it lives longer than we do."""
        client = self._there
        if client is not None:
            with suppress(TimeoutError, SglangError):
                async with asyncio.timeout(LEAVE_S):
                    for name in client.adapters:
                        await client.unload_adapter(name)
        await self._stop_keeping()
        self._end()

    async def _keep(self, client: SglangClient, info: ServerInfo) -> None:
        try:
            while True:
                await self._wait_other(client, info)
                self._down()
                _log.warning("sglang_lost", url=self._url)
                found = await self._wait_back(client)
                if found.startup_time != info.startup_time:
                    check_given(found, self._url)
                    await client.close()
                    client, info = SglangClient(self._url, key=self._key), found
                self._up(client)
        except Exception as error:  # noqa: BLE001 - whatever it is, nobody may wait for ever
            self._end(_given_up(error))
        finally:
            await client.close()

    async def _wait_other(self, client: SglangClient, info: ServerInfo) -> None:
        """Until it does not answer, or was started anew."""
        with suppress(SglangGone, SglangRefused):
            while await _is_same(client, info):  # noqa: ASYNC110 - only the server can tell
                await asyncio.sleep(POLL_S)

    async def _wait_back(self, client: SglangClient) -> ServerInfo:
        """Until it answers again; ServerError when it stays away."""
        loop = asyncio.get_running_loop()
        deadline = loop.time() + ABSENT_S
        while True:
            try:
                return await client.server_info()
            except (SglangGone, SglangRefused) as error:
                if loop.time() > deadline:
                    raise ServerError(
                        f"sampler.sglang_url: {self._url} has been away for {ABSENT_S:g} s: "
                        f"{error}; start it again, and then the sampler"
                    ) from error
            await asyncio.sleep(POLL_S)


async def _is_same(client: SglangClient, info: ServerInfo) -> bool:
    return (await client.server_info()).startup_time == info.startup_time


def _given_up(error: Exception) -> ServerError:
    if isinstance(error, ServerError):
        return error
    return ServerError(f"sglang: the server cannot be used any more: {error}")


def check_given(info: ServerInfo, url: str) -> None:
    """ConfigError unless it is the SGLang that we speak to, started as its numbers need."""
    launching.check_version(info.version, f"sampler.sglang_url: {url} is")
    wanted = {
        "--enable-deterministic-inference": info.enable_deterministic_inference,
        "--enable-lora": bool(info.enable_lora),
    }
    missing = " ".join(flag for flag, is_on in wanted.items() if not is_on)
    if missing:
        raise ConfigError(
            f"sampler.sglang_url: {url} was started without {missing}; docs/sglang.md has its "
            "command line"
        )
    if info.max_loaded_loras is not None:
        raise ConfigError(
            f"sampler.sglang_url: {url} was started with --max-loaded-loras "
            f"{info.max_loaded_loras}, and drops adapters beyond that by itself; start it without"
        )
