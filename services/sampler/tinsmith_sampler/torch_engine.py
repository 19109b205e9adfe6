"""The built-in engine: continuous batching on torch, on one thread of its own.

The event loop hands over commands and awaits futures; torch never runs on it. Whatever happens to
the thread, every future ends: when it dies or stops, all that is pending fails at once.

What holds in float32 on a CPU: a row has the same tokens and the same bits of log-probability
alone and in company, whatever was cached, and however often it had to begin anew. In bfloat16 the
same is so, at the cost of smaller passes. On a GPU it is likely, but nothing has measured it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from concurrent.futures import Future, InvalidStateError
from contextlib import asynccontextmanager, suppress
from typing import TYPE_CHECKING, Any

import structlog
import torch

from tinsmith.errors import InvalidRequest, NotSupported, ServerError
from tinsmith.metrics import devices
from tinsmith_sampler.adapter_files import AdapterReader
from tinsmith_sampler.batcher import Batcher
from tinsmith_sampler.engine import NO_EXPERTS, EngineLoad, Generated, Scored
from tinsmith_sampler.environment import describe
from tinsmith_sampler.mailbox import Mailbox
from tinsmith_sampler.model import ServedModel
from tinsmith_sampler.scores import ScoreTask
from tinsmith_sampler.stopping import Stopper, StopText
from tinsmith_sampler.tasks import Result, RowTask

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping, Sequence

    from tinsmith.messages.sampling import SamplingParams
    from tinsmith_sampler.engine import Row, Scoring
    from tinsmith_sampler.engine_memory import Place
    from tinsmith_sampler.lora_layers import Adapter
    from tinsmith_sampler.model import TorchOptions

_log = structlog.get_logger(__name__)


class TorchEngine:
    """Engine on a Hugging Face model."""

    def __init__(self, options: TorchOptions) -> None:
        self._options = options
        self._mailbox: Mailbox[Callable[[Batcher], None]] = Mailbox()
        self._pending: set[Future[Any]] = set()
        self._adapters: dict[str, Adapter] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="torch-engine", daemon=True)
        self._started: Future[tuple[ServedModel, Batcher]] = Future()
        self._ended: Future[None] = Future()

    @property
    def plane(self) -> str:
        """What computes the numbers."""
        return f"torch/{self._options.device}/{self._options.dtype}"

    root: str = ""
    """Of the weights, where they are those of a lineage."""

    @property
    def environment(self) -> dict[str, str]:
        """What decides the last bits."""
        return describe(self._options, self._model)

    @property
    def vocab_size(self) -> int:
        """Token ids are below this."""
        return self._model.vocab_size

    @property
    def context_length(self) -> int:
        """Most tokens of a prompt and its continuation together."""
        return self._model.context_length

    @property
    def route_bytes(self) -> int:
        """Of the experts that one token is sent to; 0: there are none."""
        return self._model.route_bytes

    async def start(self) -> None:
        """Load the model on the engine's thread; StartupError when it cannot be served."""
        # Huge pages for the weights: a decoding pass reads all of them, a tenth faster so. Torch
        # looks for this when it first allocates.
        os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
        self._thread.start()
        # Shielded, so that a caller who gives up leaves the thread a future that it can resolve.
        started = asyncio.shield(asyncio.wrap_future(self._started))
        self._model, self._batcher = await started
        self._reader = AdapterReader(
            self._model.layer_shapes,
            dtype=self._model.dtype,
            device=self._model.device,
            max_rank=self._options.max_lora_rank,
        )

    async def generate(self, row: Row) -> Generated:
        """Draw one continuation."""
        self._check_length(len(row.prompt) + row.max_tokens)
        self._check_stop_strings(row.params)
        if row.routed_experts and not self._model.has_experts:
            raise NotSupported(NO_EXPERTS)
        future: Future[Generated] = Future()
        task = RowTask(row, self._adapter(row.adapter), future, lambda: self._stopper(row))
        return await self._submit(future, lambda batcher: batcher.submit(task))

    async def score(self, scoring: Scoring) -> Scored:
        """Score a prompt in one pass over it."""
        self._check_length(len(scoring.prompt))
        future: Future[Scored] = Future()
        task = ScoreTask(scoring, self._adapter(scoring.adapter), future)
        if len(scoring.prompt) == 1:
            return task.result()  # the first token of a prompt has no log-probability
        return await self._submit(future, lambda batcher: batcher.submit(task))

    async def load_adapter(self, version: str, files: Mapping[str, bytes]) -> None:
        """Read and check an adapter, beside the engine's thread; InvalidRequest if it is bad."""
        if version not in self._adapters:
            self._adapters[version] = await asyncio.to_thread(self._reader.read, version, files)

    async def unload_adapter(self, version: str) -> None:
        """Forget an adapter; tasks that have it keep it until they end."""
        self._adapters.pop(version, None)

    @property
    def places(self) -> Mapping[str, Sequence[Place]]:
        """Where each tensor of the checkpoint lies; written only while the engine is ``still``."""
        return self._model.places

    @asynccontextmanager
    async def still(self) -> AsyncIterator[None]:
        """In the block nothing is computed; whatever was, or waits, is forgotten before it."""
        entered: Future[None] = Future()
        resume = threading.Event()

        def wait(batcher: Batcher) -> None:
            if entered.set_running_or_notify_cancel():  # else whoever asked has given up
                batcher.start_anew("the sampler's weights were replaced; send the request again")
                entered.set_result(None)
                resume.wait()

        try:
            self._mailbox.put(wait)
            await asyncio.wrap_future(entered)
            yield
        finally:
            resume.set()

    def abort(self, request_id: str) -> None:
        """End the tasks of a request after the pass that is running."""
        with suppress(ServerError):  # it has ended, and all its tasks with it
            self._mailbox.put(lambda batcher: batcher.abort(request_id))

    def load(self) -> EngineLoad:
        """How busy the engine is; ``running`` may lag behind by one round."""
        pending = len(self._pending)
        running = min(self._batcher.running, pending)
        return EngineLoad(
            running=running,
            queued=pending - running,
            free_rows=max(0, self._options.max_rows - pending),
        )

    async def wait_ended(self) -> None:
        """Return when the engine has been closed; raise ServerError when its thread has died."""
        await asyncio.shield(asyncio.wrap_future(self._ended))

    async def close(self) -> None:
        """Stop after the pass that is running; what is pending fails with ServerError."""
        self._stopping.set()
        if self._thread.is_alive():
            with suppress(ServerError):  # it has died by itself a moment ago
                self._mailbox.put(lambda _: None)  # wakes it
            await asyncio.to_thread(self._thread.join)

    async def _submit(self, future: Future[Result], command: Callable[[Batcher], None]) -> Result:
        # Known as pending before it is sent: a thread that dies in between fails it as well.
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        try:
            self._mailbox.put(command)
        except ServerError:
            self._pending.discard(future)
            raise
        return await asyncio.wrap_future(future)

    def _check_length(self, tokens: int) -> None:
        """More than the context would wait for room for ever."""
        if tokens > self.context_length:
            raise InvalidRequest(
                f"prompt: with what is to be drawn it has {tokens} tokens, over the context length "
                f"of {self.context_length}; shorten it or lower max_tokens"
            )

    def _check_stop_strings(self, params: SamplingParams) -> None:
        if params.stop_strings and self._model.to_text is None:
            raise NotSupported(
                "stop: this model was given to the sampler without a tokenizer; "
                "use token ids in place of strings"
            )

    def _adapter(self, version: str | None) -> Adapter | None:
        if version is None:
            return None
        if version not in self._adapters:
            raise ServerError(f"adapter {version}: it is not loaded in this sampler; load it first")
        return self._adapters[version]

    def _stopper(self, row: Row) -> Stopper:
        params = row.params
        eos = frozenset[int]() if params.ignore_eos else self._model.eos_tokens
        to_text = self._model.to_text
        return Stopper(
            max_tokens=row.max_tokens,
            stop_tokens=eos.union(params.stop_tokens),
            text=StopText(params.stop_strings, to_text)
            if params.stop_strings and to_text
            else None,
        )

    def _run(self) -> None:
        """The thread. Its end, for whatever reason, is the end of all that is pending."""
        try:
            with torch.inference_mode():
                self._serve()
        except BaseException as error:  # noqa: BLE001  nothing may end this thread in silence
            if not self._started.done():
                self._started.set_exception(error)
                return
            _log.critical("torch_thread_died", exc_info=error)
            died = f"the sampler's torch thread died of {type(error).__name__}; restart the sampler"
            self._fail_pending(died)
            self._ended.set_exception(ServerError(died))
        else:
            self._fail_pending("the sampler is shutting down; send the request again")
            self._ended.set_result(None)

    def _fail_pending(self, reason: str) -> None:
        self._mailbox.close(reason)
        for future in list(self._pending):
            with suppress(InvalidStateError):  # its owner gave up a moment ago
                future.set_exception(ServerError(reason))

    def _serve(self) -> None:
        options = self._options
        devices.tell(torch.cuda)
        model = ServedModel(options)
        batcher = Batcher(model, max_rows=options.max_rows, prefill_tokens=options.prefill_tokens)
        self._started.set_result((model, batcher))
        while not self._stopping.is_set():
            for command in self._mailbox.take(wait=batcher.is_idle):
                command(batcher)
            batcher.step()
