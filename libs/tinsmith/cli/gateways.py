"""``tinsmith gateway --workers N``: several gateways at one address, kept running."""

from __future__ import annotations

import asyncio
import signal
import sys
from typing import TYPE_CHECKING

from tinsmith import lifeline, listening, logs
from tinsmith.cli import plan
from tinsmith.cli.output import LogStream
from tinsmith.cli.supervisor import Timing, supervise

if TYPE_CHECKING:
    import socket
    from collections.abc import Mapping

    from tinsmith.config import Config

LABEL = "workers"
# A gateway lets its polls go at once and gives answers that are being sent five seconds.
TIMING = Timing(stop_s=(15.0,))


def run(config: Config, environ: Mapping[str, str]) -> int:
    """Run until told to stop; the exit code.

    Raises:
        StartupError: the address cannot be listened on, or a worker cannot start.
    """
    lifeline.tie_to_parent()
    with plan.gateway_address(config) as address:
        asyncio.run(_run(config, environ, address))
    return lifeline.EXIT_OK


async def _run(config: Config, environ: Mapping[str, str], address: socket.socket) -> None:
    is_console = logs.is_for_people(config.logs, sys.stderr)
    # Theirs is a pipe, so that they would choose JSON by themselves.
    formats = {"TINSMITH_LOGS__FORMAT": "console" if is_console else "json"}
    workers = plan.service_processes(config, ("gateway",), {**environ, **formats}, address)
    labels = [LABEL, *(worker.label for worker in workers)]
    colors = logs.has_colors(sys.stderr)
    log = LogStream(sys.stderr, labels, is_json=not is_console, has_colors=colors)
    async with supervise(log, TIMING, label=LABEL) as supervisor:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, supervisor.request_stop)
        if await supervisor.bring_up(workers):
            is_tls = plan.is_gateway_tls(config)
            url = listening.url_of(address, plan.gateway_host(config), is_tls=is_tls)
            lifeline.tell_ready({"service": "gateway", "base_models": (), "url": url})
            await supervisor.stopping.wait()
