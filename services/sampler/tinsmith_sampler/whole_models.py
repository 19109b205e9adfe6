"""Models that were trained whole: each an engine of its own beside the base model's.

Weights come as files of a checkpoint. They are laid into a folder with the base model's tokenizer,
loaded from there as any model is, and the folder is removed.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import tempfile
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from tinsmith import model_files, whole
from tinsmith.errors import NotSupported, ServerError, StartupError
from tinsmith_sampler.residency import Residency
from tinsmith_sampler.torch_engine import TorchEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from tinsmith.messages.base import BlobRef
    from tinsmith.messages.sampling import AdapterRef
    from tinsmith_sampler.engine import Generated, Row, Scored, Scoring
    from tinsmith_sampler.model import TorchOptions

_PREFIX = "whole-"  # then the process that loads from the folder


class WholeEngine(TorchEngine):
    """An engine whose model itself is what a request names as its adapter."""

    async def generate(self, row: Row) -> Generated:
        """Draw one continuation."""
        return await super().generate(replace(row, adapter=None))

    async def score(self, scoring: Scoring) -> Scored:
        """Score a prompt."""
        return await super().score(replace(scoring, adapter=None))


class WholeModels:
    """At most ``limit`` of them in memory, the least recently used one makes room."""

    def __init__(
        self,
        options: TorchOptions,
        get: Callable[[BlobRef], Awaitable[bytes]],
        *,
        limit: int,
        folder: Path | None = None,
    ) -> None:
        """``options`` are the base model's; ``limit`` 0: none are served.

        Files lie in ``folder`` while they are loaded, or where the system has its temporary files.
        """
        self._options = options
        self._get = get
        self._limit = limit
        self._folder = folder if folder is not None and folder.is_dir() else None
        self._engines: dict[str, WholeEngine] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._residency = Residency(self, max(1, limit))
        _sweep(self._folder or Path(tempfile.gettempdir()))

    @asynccontextmanager
    async def hold(self, ref: AdapterRef) -> AsyncIterator[WholeEngine]:
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
        async with self._residency.hold(ref.version, lambda: self._laid_out(ref)):
            yield self._engines[ref.version]

    async def load_adapter(self, version: str, files: Path) -> None:
        """Start an engine on a model's folder, which is removed."""
        engine = WholeEngine(replace(self._options, model_path=str(files), quantization="none"))
        try:
            await engine.start()
        except StartupError as exc:
            raise ServerError(
                f"weights {version}: a model that was trained whole cannot be loaded beside the "
                f"base model: {exc}"
            ) from exc
        finally:
            await asyncio.to_thread(shutil.rmtree, files, ignore_errors=True)
        self._engines[version] = engine
        name = f"whole model {version}"
        self._watching[version] = asyncio.create_task(self._watch(engine), name=name)

    async def unload_adapter(self, version: str) -> None:
        """End an engine that nobody uses."""
        await self._engines.pop(version).close()
        await self._watching.pop(version)

    async def wait_failed(self) -> None:
        """Does not return; raises ServerError when one of the engines has died."""
        await asyncio.shield(self._failed)

    async def close(self) -> None:
        """End all engines."""
        for version in list(self._engines):
            await self.unload_adapter(version)

    async def _watch(self, engine: WholeEngine) -> None:
        try:
            await engine.wait_ended()
        except ServerError as exc:
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


def _sweep(parent: Path) -> None:
    """Remove what killed processes have left."""
    for folder in parent.glob(f"{_PREFIX}*-*"):
        owner = folder.name.removeprefix(_PREFIX).partition("-")[0]
        if owner.isdecimal() and not Path("/proc", owner).exists() and Path("/proc").exists():
            shutil.rmtree(folder, ignore_errors=True)
