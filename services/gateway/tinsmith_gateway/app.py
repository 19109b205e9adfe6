"""The aiohttp application of a gateway, and how it is run."""

from __future__ import annotations

from aiohttp import web

from tinsmith_gateway import middleware, routes
from tinsmith_gateway.gateway import GATEWAY, Gateway

SHUTDOWN_S = 5.0  # for answers that are being sent; held polls have been let go before
MAX_HEADER_BYTES = 16 << 10


def build_app(gateway: Gateway) -> web.Application:
    """The application; it serves what ``gateway`` is made of and owns nothing."""
    app = web.Application(middlewares=middleware.ALL)
    app[GATEWAY] = gateway
    app.add_routes(routes.ROUTES)
    return app


def build_runner(app: web.Application) -> web.AppRunner:
    """A runner that leaves compressed bodies to us: see ``bodies``."""
    return web.AppRunner(
        app,
        auto_decompress=False,
        access_log=None,
        shutdown_timeout=SHUTDOWN_S,
        max_field_size=MAX_HEADER_BYTES,
        handle_signals=False,
    )
