"""The HTTP surface, one module per subject matter."""

from __future__ import annotations

from tinsmith_gateway.routes import (
    audit,
    cancellations,
    checkpoints,
    clones,
    completions,
    copies,
    custom_losses,
    dashboard,
    downloads,
    futures,
    health,
    info,
    keys,
    openai,
    runs,
    sampling,
    session,
    session_search,
    startup,
    training,
    unloading,
    usage,
)

_MODULES = (
    health,
    startup,
    keys,
    session,
    session_search,
    training,
    unloading,
    custom_losses,
    sampling,
    clones,
    futures,
    completions,
    cancellations,
    info,
    runs,
    checkpoints,
    copies,
    downloads,
    audit,
    usage,
    openai,
    dashboard,
)
ROUTES = tuple(route for module in _MODULES for route in module.ROUTES)
