"""Models that were trained whole: each an engine of its own beside the base model's.

The newest version of a model comes by its lineage into an engine that follows it. Any other comes
as files of a checkpoint: they are laid into a folder with the base model's tokenizer, loaded from
there as any model is, and the folder is removed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import structlog

from tinsmith import model_files, whole
from tinsmith.errors import (
    BrokerUnavailable,
    NotSupported,
    ServerError,
    StartupError,
    VersionUnmet,
)
from tinsmith_sampler.following import Follower
from tinsmith_sampler.residency import Residency
from tinsmith_sampler.standing import Standing
from tinsmith_sampler.whole_engine import WholeEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tinsmith.bus import Bus
    from tinsmith.config import ModelConfig
    from tinsmith.messages.base import BlobRef
    from tinsmith.messages.sampling import AdapterRef
    from tinsmith.messages.weights import PublishedVersion
    from tinsmith_sampler.config import SamplerConfig
    from tinsmith_sampler.model import TorchOptions
    from tinsmith_sampler.whole_engine import Whole

    NewEngine = Callable[[str], Whole]
    """From a model's folder or hub id; not started."""

log = structlog.get_logger(__name__)

_LINEAGE = "lineage "  # then its id: what an engine that follows it is called
_PREFIX = "whole-"  # then the process that loads from the folder


class Lineages:
    """How engines follow lineages: over which bus, called what, telling which figures."""

    def __init__(self, bus: Bus, replica: str, figures: dict[str, float]) -> None:
        """``bus`` is one of its own: chunks would delay everything else on their connection."""
        self._bus = bus
        self._replica = replica
        self._figures = figures
        self.standing = Standing(figures)
        self._unmet: dict[str, int] = {}  # versions that were not reached

    async def follower(self, options: TorchOptions, new: NewEngine, lineage_id: str) -> Follower:
        """An engine that will follow a lineage."""
        return Follower(
            self._bus,
            options,
            lineage_id,
            replica=self._replica,
            figures=self._figures,
            standing=self.standing,
            engine=new(options.model_path),
        )

    def give_up(self, version: PublishedVersion) -> None:
        """It was waited for in vain: only for a newer one is the lineage followed again."""
        known = self._unmet.get(version.lineage_id, 0)
        self._unmet[version.lineage_id] = max(known, version.version)

    async def is_newest(self, version: PublishedVersion) -> bool:
        """Whether it is worth following the lineage for this version."""
        if version.version <= self._unmet.get(version.lineage_id, 0):
            return False
        try:
            head = await self._bus.lineages.head(version.lineage_id)
        except BrokerUnavailable:
            return False
        return head is None or head.version <= version.version  # it may lag


class WholeModels:
    """At most ``limit`` of them in memory, the least recently used one makes room."""

    def __init__(
        self,
        options: TorchOptions,
        get: Callable[[BlobRef], Awaitable[bytes]],
        *,
        limit: int,
        folder: Path | None = None,
        lineages: Lineages | None = None,
        new_engine: NewEngine | None = None,
    ) -> None:
        """``options`` are the base model's; ``limit`` 0: none are served.

        ``new_engine`` makes engines other than the built-in one.

        Files lie in ``folder`` while they are loaded, or where the system has its temporary files.
        Without ``lineages`` all weights come as files.
        """
        self._options = options
        self._get = get
        self._limit = limit
        self._folder = folder if folder is not None and folder.is_dir() else None
        self._lineages = lineages
        self._new_engine = new_engine or self._built_in
        self._engines: dict[str, Whole] = {}
        self._folders: dict[str, Path] = {}  # that engines need
        self._followers: dict[str, Follower] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._residency = Residency(self, max(1, limit))
        _sweep(self._folder or Path(tempfile.gettempdir()))

    @asynccontextmanager
    async def hold(self, ref: AdapterRef) -> AsyncIterator[Whole]:
        """The engine of these weights, which stays for as long as the block.

        Raises:
            NotSupported: such models are not served here.
            BlobMissing: the weights are not there any more.
            ServerError: there is no room for them; with figures.
        """
        if not self._limit:
            raise NotSupported(
                "model_path: these weights are a model of their own, trained whole, and this "
                "sampler serves adapters alone; set full = true in the model's [[models]] entry"
            )
        async with AsyncExitStack() as held:
            yield await self._followed(ref, held) or await self._loaded(ref, held)

    async def _loaded(self, ref: AdapterRef, held: AsyncExitStack) -> Whole:
        """An engine on the checkpoint's files."""
        await held.enter_async_context(
            self._residency.hold(ref.version, lambda: self._laid_out(ref))
        )
        return self._engines[ref.version]

    async def _followed(self, ref: AdapterRef, held: AsyncExitStack) -> Whole | None:
        """The engine that follows the lineage, if this is the version that it serves."""
        version, lineages = ref.published, self._lineages
        if version is None or lineages is None or ref.version in self._engines:
            return None
        key = f"{_LINEAGE}{version.lineage_id}"
        if key not in self._followers and not await lineages.is_newest(version):
            return None
        async with AsyncExitStack() as trial:
            new = partial(lineages.follower, self._options, self._new_engine, version.lineage_id)
            await trial.enter_async_context(self._residency.hold(key, new))
            try:
                engine = await trial.enter_async_context(self._followers[key].hold(version))
            except VersionUnmet as exc:
                log.info("version loaded from files", reason=str(exc))
                lineages.give_up(version)
                return None
            await held.enter_async_context(trial.pop_all())
            return engine

    async def load_adapter(self, version: str, files: Path | Follower) -> None:
        """Start an engine on a model's folder, or one that follows a lineage.

        The folder is removed as soon as the engine does not need it.
        """
        if isinstance(files, Follower):
            await self._start(version, files)
            self._followers[version] = files
            return
        engine, self._folders[version] = self._new_engine(str(files)), files
        try:
            await self._start(version, engine)
        except BaseException:
            await self._remove_folder(version)
            raise
        if not engine.keeps_folder:
            await self._remove_folder(version)
        self._engines[version] = engine

    async def unload_adapter(self, version: str) -> None:
        """End an engine that nobody uses."""
        engine = self._followers.pop(version, None) or self._engines.pop(version)
        await engine.close()
        await self._watching.pop(version)
        await self._remove_folder(version)

    async def _remove_folder(self, version: str) -> None:
        if (folder := self._folders.pop(version, None)) is not None:
            await asyncio.to_thread(shutil.rmtree, folder, ignore_errors=True)

    def _built_in(self, path: str) -> Whole:
        return WholeEngine(replace(self._options, model_path=path, quantization="none"))

    async def _start(self, version: str, engine: Whole | Follower) -> None:
        try:
            await engine.start()
        except StartupError as exc:
            raise ServerError(
                f"weights {version}: a model that was trained whole cannot be loaded beside the "
                f"base model: {exc}"
            ) from exc
        name = f"whole model {version}"
        self._watching[version] = asyncio.create_task(self._watch(engine), name=name)

    async def wait_failed(self) -> None:
        """Does not return; raises ServerError when one of the engines has died."""
        await asyncio.shield(self._failed)

    async def close(self) -> None:
        """End all engines."""
        for version in [*self._engines, *self._followers]:
            await self.unload_adapter(version)

    async def _watch(self, engine: Whole | Follower) -> None:
        try:
            await engine.wait_ended()
        except Exception as exc:  # noqa: BLE001 - whatever it is, the process must not limp on
            if not self._failed.done():
                self._failed.set_exception(exc)

    async def _laid_out(self, ref: AdapterRef) -> Path:
        """A folder that has the model; one file of it is in memory at a time."""
        base = model_files.find(self._options.model_path).folder
        folder = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=self._folder))
        try:
            for file in base.iterdir():
                if ".safetensors" not in file.name and file.name != whole.CONFIG_FILE:
                    (folder / file.name).symlink_to(file.absolute())
            for name in whole.weight_files(ref.files):
                data = await self._get(ref.files[name])
                await asyncio.to_thread((folder / name).write_bytes, data)
        except OSError as exc:
            shutil.rmtree(folder, ignore_errors=True)
            need = sum(one.size for one in ref.files.values())
            raise ServerError(
                f"weights {ref.version}: {need / (1 << 30):.2f} GiB cannot be written to {folder}: "
                f"{exc.strerror}; free space there"
            ) from exc
        except BaseException:
            shutil.rmtree(folder, ignore_errors=True)
            raise
        return folder


def new_engines(model: ModelConfig, config: SamplerConfig, data_dir: Path) -> NewEngine | None:
    """What makes engines that are not built in. Imports torch, so it runs on a thread."""
    if config.engine == "torch":
        return None
    from tinsmith_sampler.sglang.assembly import sglang_wholes

    return sglang_wholes(model, config, data_dir)


def _sweep(parent: Path) -> None:
    """Remove what killed processes have left."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists() and Path("/proc").exists():
            shutil.rmtree(folder, ignore_errors=True)
