"""Running one service in this process: what it needs, its configuration, its exit code."""

from __future__ import annotations

import os
import re
from importlib import metadata
from typing import TYPE_CHECKING

from tinsmith import config
from tinsmith.cli import model_check, plan
from tinsmith.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping
    from pathlib import Path

ENTRY_POINTS = "tinsmith.services"


def run(service: str, path: Path | None, overrides: Mapping[str, str]) -> int:
    """Load the configuration and run ``service`` until it ends; returns its exit code.

    Raises:
        StartupError: a package or the model is absent, or the configuration is wrong.
    """
    require_extra(service)
    loaded = config.load(path, {**os.environ, **overrides})
    if service in plan.PER_MODEL:
        model_check.check(loaded.model(plan.model_of(loaded, service)))
    if service == "gateway" and plan.workers(loaded) > 1:
        from tinsmith.cli import gateways

        return gateways.run(loaded, os.environ)
    (point,) = metadata.entry_points(group=ENTRY_POINTS, name=service)
    main: Callable[[config.Config], int] = point.load()
    return main(loaded)


def require_extra(extra: str) -> None:
    """StartupError when a package that ``tinsmith[<extra>]`` brings is not installed."""
    for requirement in metadata.requires("tinsmith") or ():
        # Requirements with a second condition are for other Pythons or platforms.
        match = re.fullmatch(rf"([\w.-]+)[^;]*; extra == ['\"]{extra}['\"]", requirement)
        if match and not _is_installed(match[1]):
            raise StartupError(
                f"the package {match[1]} is not installed; pip install 'tinsmith[{extra}]'"
            )


def _is_installed(package: str) -> bool:
    try:
        metadata.distribution(package)
    except metadata.PackageNotFoundError:
        return False
    return True
