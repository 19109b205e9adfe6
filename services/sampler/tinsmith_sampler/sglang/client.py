"""A client of one SGLang server: the calls that an engine needs, and what they must not do to it.

It belongs to one start of one server: after a restart there is another client. What would hang or
kill the server, or have it answer with other weights than were asked for, is not sent.
"""

from __future__ import annotations

import asyncio
from contextlib import ExitStack, aclosing, contextmanager
from typing import TYPE_CHECKING, Any

import msgspec

from tinsmith_sampler.sglang import wire
from tinsmith_sampler.sglang.failures import SglangGone, SglangRefused, SglangUnsafe
from tinsmith_sampler.sglang.http import Http, decoded, said
from tinsmith_sampler.sglang.names import AdapterNames, RequestNames
from tinsmith_sampler.sglang.pausing import Pausing

if TYPE_CHECKING:
    from collections.abc import AsyncGenerator, Coroutine, Iterable, Iterator, Mapping
    from pathlib import Path

    import torch

GENERATE_S = 6 * 3600.0  # a row may wait behind many; a server that hangs is found by its health
CONTROL_S = 60.0
WEIGHTS_S = 600.0  # an adapter, or a share of all weights


class SglangClient:
    """All methods belong to one event loop. They raise SglangError and its kinds, nothing else."""

    def __init__(self, url: str, *, key: str = "", folder: Path | None = None) -> None:
        """``key`` is the server's ``--api-key``, ``folder`` one that a server of ours reads too."""
        self.url = url
        self.folder = folder
        self._http = Http(url, key)
        self._adapters = AdapterNames()
        self._requests = RequestNames()
        self._pausing = Pausing()
        self._is_updating = False
        self._background: set[asyncio.Task[Any]] = set()

    @property
    def adapters(self) -> frozenset[str]:
        """Names of the adapters that may be used."""
        return self._adapters.loaded

    @property
    def is_paused(self) -> bool:
        """Whether the server was told to pause and not to resume."""
        return self._pausing.is_paused

    async def generate(self, request: wire.Generate) -> wire.Answer:
        """Answer one request, whole. Giving up on it ends it in the server too.

        An aborted one is an answer as well, with the reason ``abort``.
        """
        with self._sent(request, stream=False) as body:
            data = await self._http.post("/generate", body, timeout_s=GENERATE_S)
            return decoded(wire.Answer, data)

    async def stream(self, request: wire.Generate) -> AsyncGenerator[wire.Answer, None]:
        """As ``generate``, in parts: each has the tokens, and their items, since the one before.

        The last one has the finish reason. To be closed (``aclosing``) when it is left early.
        """
        with self._sent(request, stream=True) as body:
            seen = 0
            events = self._http.events("/generate", body, timeout_s=GENERATE_S)
            async with aclosing(events):
                async for data in events:
                    answer = _streamed(data)
                    yield _since(answer, seen)
                    seen = answer.meta_info.completion_tokens

    async def abort(self, rid: str) -> None:
        """End all requests of that name soon; whoever awaits them gets what they have."""
        for there in self._requests.of(rid):
            await self._command("/abort_request", {"rid": there})

    async def load_adapter_from_tensors(
        self,
        name: str,
        config: Mapping[str, Any],
        tensors: Mapping[str, torch.Tensor],
        *,
        pinned: bool = False,
    ) -> None:
        """Load an adapter under a name that is free here: PEFT's configuration and tensors.

        Goes on when the caller gives up; ``adapters`` tells whether it is there then.
        """
        from tinsmith_sampler.sglang import payload

        async def load() -> None:
            with self._adapters.loading(name) as there:
                body = wire.LoadAdapter(
                    lora_name=there,
                    config_dict=dict(config),
                    serialized_named_tensors=[await asyncio.to_thread(payload.of_adapter, tensors)],
                    pinned=pinned,
                )
                await self._command("/load_lora_adapter_from_tensors", body, timeout_s=WEIGHTS_S)

        await self._through(load(), f"load {name}")

    async def unload_adapter(self, name: str) -> None:
        """Forget an adapter at once; the server forgets it when no request of ours uses it.

        The server would hang on it while it is paused, and keep every other adapter waiting while
        a request uses it, so it is told when neither is so. Goes on when the caller gives up.
        """
        adapter = self._adapters.forget(name)

        async def unload() -> None:
            await adapter.wait_unused()
            async with self._pausing.unpaused():
                await self._command("/unload_lora_adapter", {"lora_name": adapter.there})

        await self._through(unload(), f"unload {name}")

    async def pause(self, mode: wire.PauseMode = "retract") -> None:
        """Compute nothing until ``resume``; requests that arrive wait."""
        async with self._pausing.pausing():
            await self._command("/pause_generation", {"mode": mode})

    async def resume(self) -> None:
        """Go on; harmless when it was not paused."""
        await self._command("/continue_generation", {})
        await self._pausing.resumed()

    async def begin_update(self) -> None:
        """Open the one window in which tensors may be replaced."""
        if self._is_updating:
            raise SglangUnsafe("an update of the weights is open already; end it first")
        self._is_updating = True
        try:
            await self._command("/begin_weight_update", {})
        except SglangRefused:
            self._is_updating = False
            raise

    async def update_tensors(
        self,
        named: Iterable[tuple[str, torch.Tensor]],
        *,
        weight_version: str | None = None,
        load_format: str | None = None,
        flush: bool = True,
    ) -> None:
        """Replace tensors, by their names in the model's checkpoint.

        After SglangRefused some may be replaced and some not: begin anew with all of them. A
        server that is paused ``in_place`` with requests refuses to ``flush``.
        """
        from tinsmith_sampler.sglang import payload

        if not self._is_updating:
            raise SglangUnsafe("no update of the weights is open; begin one first")
        body = wire.UpdateTensors(
            serialized_named_tensors=[await asyncio.to_thread(payload.of_weights, named)],
            load_format=load_format,
            flush_cache=flush,
            weight_version=weight_version,
        )
        await self._command("/update_weights_from_tensor", body, timeout_s=WEIGHTS_S)

    async def end_update(self) -> None:
        """Close the window."""
        if not self._is_updating:
            raise SglangUnsafe("no update of the weights is open, so none can be ended")
        await self._command("/end_weight_update", {}, timeout_s=WEIGHTS_S)
        self._is_updating = False

    async def flush_cache(self, timeout_s: float = 10.0) -> None:
        """Forget cached keys and values; SglangRefused while anything runs or waits."""
        wait = {"timeout": str(timeout_s)}
        await self._http.post("/flush_cache", None, timeout_s=timeout_s + CONTROL_S, params=wait)

    async def checksums(self) -> dict[str, str]:
        """Of every tensor in the memory of the first rank, by the server's own names of them."""
        body = {"action": "checksum"}
        data = await self._http.post("/weights_checker", body, timeout_s=WEIGHTS_S)
        checked = decoded(wire.Checked, data)
        return dict(checked.ranks[0].checksums)

    async def model_info(self) -> wire.ModelInfo:
        """What it serves."""
        return decoded(wire.ModelInfo, await self._http.get("/model_info", timeout_s=CONTROL_S))

    async def server_info(self) -> wire.ServerInfo:
        """Its version, and how it was started."""
        return decoded(wire.ServerInfo, await self._http.get("/server_info", timeout_s=CONTROL_S))

    async def metrics(self) -> str:
        """What it counts, in the format of Prometheus; SglangRefused unless that was turned on."""
        return (await self._http.get("/metrics", timeout_s=CONTROL_S)).decode()

    async def health(self, *, timeout_s: float = 30.0) -> bool:
        """Whether it answers and computes, which it does not while it is paused."""
        try:
            await self._http.get("/health", timeout_s=timeout_s)
        except (SglangGone, SglangRefused):
            return False
        return True

    async def close(self) -> None:
        """Drop the connections, and what still goes on."""
        for task in tuple(self._background):
            task.cancel()
        await asyncio.gather(*self._background, return_exceptions=True)
        await self._http.close()

    @contextmanager
    def _sent(self, request: wire.Generate, *, stream: bool) -> Iterator[wire.Generate]:
        """The request as the server gets it; one that is left early is ended there."""
        with ExitStack() as held:
            there = None
            if request.lora_path is not None:
                adapter = self._adapters.get(request.lora_path)
                held.enter_context(adapter.used())
                there = adapter.there
            rid = held.enter_context(self._requests.running(request.rid))
            try:
                yield msgspec.structs.replace(request, rid=rid, lora_path=there, stream=stream)
            except (asyncio.CancelledError, GeneratorExit):
                self._later(self._command("/abort_request", {"rid": rid}))
                raise

    async def _command(self, path: str, body: object, *, timeout_s: float = CONTROL_S) -> None:
        data = await self._http.post(path, body, timeout_s=timeout_s)
        if data.strip() and decoded(_Success, data).success is False:
            raise SglangRefused(200, said(data))

    async def _through(self, work: Coroutine[Any, Any, None], name: str) -> None:
        """Awaits it, and lets it go on when the caller gives up."""
        task = self._later(work, name)
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            caller = asyncio.current_task()
            if task.cancelled() and not (caller and caller.cancelling()):
                raise SglangGone("its client was closed") from None
            raise

    def _later(self, work: Coroutine[Any, Any, None], name: str = "") -> asyncio.Task[None]:
        task = asyncio.create_task(work, name=name or None)
        self._background.add(task)
        task.add_done_callback(self._finished)
        return task

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._background.discard(task)
        if not task.cancelled():
            task.exception()  # seen: whoever awaits it is told, and nobody else can act on it


class _Success(msgspec.Struct, frozen=True):
    success: bool | None = None


class _StreamError(msgspec.Struct, frozen=True):
    message: str = ""
    code: int = 400


class _StreamFailed(msgspec.Struct, frozen=True):
    error: _StreamError | None = None


def _streamed(data: bytes) -> wire.Answer:
    """One event; a stream that has begun can only tell an error as another event."""
    failed = decoded(_StreamFailed, data).error
    if failed is not None:
        raise SglangRefused(failed.code, failed.message)
    return decoded(wire.Answer, data)


_PER_TOKEN = ("output_token_logprobs", "output_top_logprobs", "output_token_ids_logprobs")


def _since(answer: wire.Answer, seen: int) -> wire.Answer:
    """Without its first ``seen`` tokens, if it has them: a server may tell all, or what is new."""
    if len(answer.output_ids) + seen == answer.meta_info.completion_tokens or not seen:
        return answer
    meta = answer.meta_info
    cut = {name: items[seen:] for name in _PER_TOKEN if (items := getattr(meta, name)) is not None}
    return wire.Answer(
        output_ids=answer.output_ids[seen:], meta_info=msgspec.structs.replace(meta, **cut)
    )
