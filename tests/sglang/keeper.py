"""A process that keeps an SGLang server and says, line by line, what becomes of it; for tests."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path

import structlog
from tests.sglang import running

from tinsmith_sampler.sglang.server import OwnServer


async def keep(model, log):
    server = OwnServer(running.options(model), log)
    await server.start()
    while True:
        client = await server.current()
        say(pid=server.pid, url=client.url, healthy=await client.health())
        while client is await asyncio.wait_for(server.current(), 1200):
            await asyncio.sleep(0.2)


def say(**what):
    sys.stdout.write(json.dumps(what) + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    structlog.configure(logger_factory=structlog.PrintLoggerFactory(sys.stderr))
    asyncio.run(keep(Path(sys.argv[1]), Path(sys.argv[2])))
