"""The gateway as a service: listens until it is told to stop."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from tinsmith.errors import StartupError
from tinsmith.paths import DataDir
from tinsmith.service import ServiceContext, run_service
from tinsmith_gateway.config import GatewayConfig

if TYPE_CHECKING:
    from aiohttp import web

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
    from tinsmith_gateway.app import build_app, build_runner
    from tinsmith_gateway.auth import read_keys
    from tinsmith_gateway.gateway import Gateway

    config = context.config.section(GatewayConfig)
    keys = read_keys(config, DataDir(context.config.data_dir).api_key)
    gateway = Gateway.build(config, context.bus, keys, context.seals)
    runner = build_runner(build_app(gateway))
    await gateway.start()
    gateway.keys.warn_if_empty()
    try:
        await runner.setup()
        await context.ready(url=await _listen(runner, config))
        await gateway.keep_watch(context.stopping)
    finally:
        await runner.cleanup()
        await gateway.close()


async def _listen(runner: web.AppRunner, config: GatewayConfig) -> str:
    """Opens the port; the address that clients can use."""
    from aiohttp import web

    site = web.TCPSite(runner, config.host, config.port)
    try:
        await site.start()
    except OSError as error:
        raise StartupError(_cannot_listen(config, error)) from error
    port = runner.addresses[0][1]
    host = "127.0.0.1" if config.host in ("0.0.0.0", "") else config.host
    return f"http://{host}:{port}"


def _cannot_listen(config: GatewayConfig, error: OSError) -> str:
    address = f"gateway: cannot listen on {config.host}:{config.port}"
    if error.errno == errno.EADDRINUSE:
        return (
            f"{address}: gateway.port {config.port} is taken by another program; stop that, or "
            "choose another with TINSMITH_GATEWAY__PORT"
        )
    return f"{address} ({error.strerror or error}); set gateway.host and gateway.port"
