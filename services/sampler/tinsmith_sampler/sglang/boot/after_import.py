"""Changes to modules, each made right after its module was first imported.

Imported by us they would come too early: SGLang reads its environment when it is imported.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import MetaPathFinder
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType

    Change = Callable[[Any], None]


class _Finder(MetaPathFinder):
    def __init__(self, changes: dict[str, Change]) -> None:
        self._changes = changes

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        # Taken out first: the look-up below comes by here again.
        change = self._changes.pop(name, None)
        spec = importlib.util.find_spec(name) if change else None
        if change is None or spec is None or spec.loader is None:
            return None
        run = spec.loader.exec_module

        def run_and_change(module: ModuleType) -> None:
            run(module)
            change(module)

        spec.loader.exec_module = run_and_change  # type: ignore[method-assign]
        return spec


def install(changes: dict[str, Change]) -> None:
    """Module name -> what is done to it."""
    sys.meta_path.insert(0, _Finder(dict(changes)))
