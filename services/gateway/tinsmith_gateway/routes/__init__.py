"""The HTTP surface, one module per subject matter."""

from __future__ import annotations

from tinsmith_gateway.routes import (
    futures,
    health,
    info,
    listings,
    sampling,
    session,
    training,
    unsupported,
)

ROUTES = (
    *health.ROUTES,
    *session.ROUTES,
    *training.ROUTES,
    *sampling.ROUTES,
    *futures.ROUTES,
    *info.ROUTES,
    *listings.ROUTES,
    *unsupported.ROUTES,
)
