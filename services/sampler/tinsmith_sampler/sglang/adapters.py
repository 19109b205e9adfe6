"""The adapters that rows may name, and in which start of the server each of them is.

What is loaded is kept here as well: a server that was started anew has no adapters, and gets each
again when a row needs it.
"""

from __future__ import annotations

import asyncio
import itertools
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any

import torch

from tinsmith.errors import InvalidRequest, NotSupported, ServerError
from tinsmith_sampler.adapter_files import AdapterReader
from tinsmith_sampler.sglang.failures import SglangError
from tinsmith_sampler.sglang.fused import completed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from tinsmith_sampler.adapter_files import Pairs, PeftConfig
    from tinsmith_sampler.sglang.base_model import BaseModel
    from tinsmith_sampler.sglang.client import SglangClient


class HeldAdapter:
    """One adapter: what a server loads, and how many rows need it."""

    def __init__(self, name: str, config: PeftConfig, pairs: Pairs) -> None:
        self.name = name
        """By which clients know it; no other has ever had it."""
        self._config = _config(config, pairs)
        self._tensors = {
            f"base_model.model.{layer}.lora_{side}.weight": tensor
            for layer, pair in pairs.items()
            for side, tensor in pair.items()
        }
        self._client: SglangClient | None = None  # of the server that has it
        self._loading: asyncio.Task[None] | None = None
        self._users = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @contextmanager
    def used(self) -> Iterator[None]:
        """In the block it is not unloaded."""
        self._users += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._users -= 1
            if not self._users:
                self._unused.set()

    async def load(self, client: SglangClient) -> None:
        """Have it in the server of ``client``, once for all who wait; SglangError."""
        if self._client is not client or self._loading is None:
            self._client = client
            work = client.load_adapter_from_tensors(self.name, self._config, self._tensors)
            self._loading = asyncio.create_task(work, name=f"load {self.name}")
            self._loading.add_done_callback(self._loaded)
        await asyncio.shield(self._loading)

    async def unload(self) -> None:
        """Let the server that has it forget it, once no row needs it."""
        await self._unused.wait()
        if self._client is None or self._loading is None:
            return
        with suppress(SglangError):  # then it is not there
            await asyncio.shield(self._loading)
            await self._client.unload_adapter(self.name)

    def _loaded(self, task: asyncio.Task[None]) -> None:
        if task is self._loading and (task.cancelled() or task.exception() is not None):
            self._loading = None  # the next one tries anew


class Adapters:
    """Adapters by their versions."""

    def __init__(self, model: BaseModel, *, max_rank: int) -> None:
        self._max_rank = max_rank
        self._layers = model.layers
        self._reader = AdapterReader(
            model.layers, dtype=torch.float32, device="cpu", max_rank=max_rank
        )
        self._held: dict[str, HeldAdapter] = {}
        self._count = itertools.count()
        self._unloading: set[asyncio.Task[None]] = set()

    async def read(self, version: str, files: Mapping[str, bytes]) -> HeldAdapter:
        """Check an adapter's files; InvalidRequest and NotSupported say what is wrong with them."""
        try:
            config, pairs = await asyncio.to_thread(self._reader.check, version, files)
        except InvalidRequest as problem:
            if ".experts" not in str(problem):
                raise
            raise NotSupported(
                f"adapter {version}: it changes experts, and the SGLang engine serves adapters of "
                "linear layers alone; train with train_mlp = false, or serve the model with "
                '[sampler] engine = "torch"'
            ) from problem
        whole = completed(pairs, self._layers)
        return HeldAdapter(f"{version}.{next(self._count)}", config, whole)

    def __contains__(self, version: str) -> bool:
        return version in self._held

    def get(self, version: str) -> HeldAdapter:
        """The adapter of that version; ServerError when it is not loaded."""
        if version not in self._held:
            raise ServerError(f"adapter {version}: it is not loaded in this sampler; load it first")
        return self._held[version]

    def add(self, version: str, adapter: HeldAdapter) -> None:
        """From now on rows may name it."""
        self._held[version] = adapter

    def remove(self, version: str) -> HeldAdapter | None:
        """From now on no row may name it."""
        return self._held.pop(version, None)

    async def unload(self, version: str) -> None:
        """As ``remove``; the server forgets it too, even if the caller gives up."""
        adapter = self.remove(version)
        if adapter is None:
            return
        task = asyncio.create_task(adapter.unload(), name=f"unload {adapter.name}")
        self._unloading.add(task)
        task.add_done_callback(self._unloading.discard)
        await asyncio.shield(task)

    async def close(self) -> None:
        """Leave to a server that ends what it has."""
        for task in self._unloading:
            task.cancel()
        await asyncio.gather(*self._unloading, return_exceptions=True)


def _config(config: PeftConfig, pairs: Pairs) -> dict[str, Any]:
    """PEFT's configuration, as far as the server reads it; B(A(x)) is scaled by alpha / r."""
    return {
        "peft_type": "LORA",
        "r": config.r,
        "lora_alpha": config.lora_alpha,
        "target_modules": sorted({layer.rpartition(".")[2] for layer in pairs}),
        "bias": "none",
        "use_dora": False,
        "use_rslora": False,
    }
