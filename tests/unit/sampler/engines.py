"""Engines that run for a block, what waits for them, and ways to stop one between two rounds."""

from __future__ import annotations

import asyncio
import threading
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING

from tinsmith_sampler.model import TorchOptions
from tinsmith_sampler.torch_engine import TorchEngine

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

    from tinsmith_sampler.engine import Generated, Row


@asynccontextmanager
async def running(folder: Path, **options: object) -> AsyncIterator[TorchEngine]:
    """An engine with little room, or as much as ``options`` say."""
    engine = TorchEngine(TorchOptions(**{"model_path": str(folder), "kv_tokens": 4096} | options))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@contextmanager
def held(engine: TorchEngine) -> Iterator[None]:
    """Inside the block the engine's thread does nothing; commands queue up."""
    gate = threading.Event()
    engine._mailbox.put(lambda _: gate.wait(30))
    try:
        yield
    finally:
        gate.set()


async def together(engine: TorchEngine, rows: Sequence[Row]) -> list[Generated]:
    """The rows, all of them there before the engine's next round."""
    with held(engine):
        tasks = [asyncio.create_task(engine.generate(one)) for one in rows]
        await asyncio.sleep(0)  # each task has sent its command
    return await asyncio.gather(*tasks)


async def until(condition: Callable[[], bool]) -> None:
    """Wait for what the engine's thread brings about."""
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


def bits(generated: Generated) -> tuple[bytes, bytes]:
    """What must be equal for two rows to be the same, to the last bit."""
    return generated.tokens.tobytes(), generated.logprobs.tobytes()
