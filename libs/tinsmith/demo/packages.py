"""Which packages of the extra ``demo`` are there."""

from __future__ import annotations

import importlib.util

from tinsmith.errors import StartupError


def require(*names: str) -> None:
    """StartupError that names the extra, when one of the packages is not installed."""
    for name in names:
        if importlib.util.find_spec(name) is None:
            raise StartupError(
                f"the package {name} is not installed; pip install 'tinsmith[all,demo]'"
            )
