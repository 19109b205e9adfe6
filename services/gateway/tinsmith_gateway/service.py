"""The gateway as a service: listens until it is told to stop."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith import listening
from tinsmith.paths import DataDir
from tinsmith.service import ServiceContext, run_service
from tinsmith_gateway.config import GatewayConfig

if TYPE_CHECKING:
    from tinsmith.config import Config


def main(config: Config) -> int:
    """Run a gateway; the process's exit code."""
    return run_service("gateway", serve, config)


async def serve(context: ServiceContext) -> None:
    """Answer requests until ``context.stopping``.

    Raises:
        StartupError: a key cannot be used, or the address cannot be listened on.
    """
    # aiohttp and protobuf take a while to load, and the configuration is checked before.
    from aiohttp import web

    from tinsmith_gateway.app import build_app, build_runner
    from tinsmith_gateway.auth import read_keys, with_operators
    from tinsmith_gateway.certificate import tls_context
    from tinsmith_gateway.gateway import Gateway
    from tinsmith_gateway.readiness import readiness

    config = context.config.section(GatewayConfig)
    key_file = DataDir(context.config.data_dir).api_key
    keys = read_keys(config, key_file)
    tls = tls_context(config)
    config = with_operators(config, keys, key_file)
    gateway = Gateway.build(config, context.bus, keys, context.seals)
    context.health.checks.append(lambda: readiness(gateway))
    runner = build_runner(build_app(gateway))
    with listening.inherited() or listening.bind(config.host, config.port) as address:
        await gateway.start()
        gateway.keys.warn_if_empty()
        try:
            await runner.setup()
            site = web.SockSite(runner, address, backlog=listening.BACKLOG, ssl_context=tls)
            await site.start()
            await context.ready(url=listening.url_of(address, config.host, is_tls=tls is not None))
            await gateway.keep_watch(context.stopping)
        finally:
            await runner.cleanup()
            await gateway.close()
