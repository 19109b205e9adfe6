"""Modules that SGLang imports and a CPU never calls.

``sgl_kernel`` has no wheel for CPUs, and ``torchvision`` beside a CPU build of torch breaks
transformers. Without them ``import sglang.srt.managers.io_struct`` fails already. Names out of
them can be imported, subclassed and compared; to call one is an error that says its name.
"""

from __future__ import annotations

import importlib.util
import sys
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

# The first is never used, even where it is installed: its libraries are for CUDA.
_ALWAYS = frozenset({"sgl_kernel"})
_IF_ABSENT = frozenset({"torchvision"})


def install() -> None:
    """Stand in for what is absent."""
    absent = {name for name in _IF_ABSENT if importlib.util.find_spec(name) is None}
    sys.meta_path.insert(0, _Finder(_ALWAYS | absent))


class _Finder(MetaPathFinder, Loader):
    def __init__(self, roots: frozenset[str]) -> None:
        self._roots = roots

    def find_spec(
        self, name: str, _path: Sequence[str] | None = None, _target: ModuleType | None = None
    ) -> ModuleSpec | None:
        is_ours = name.partition(".")[0] in self._roots
        return ModuleSpec(name, self, is_package=True) if is_ours else None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return _StandIn(spec.name)

    def exec_module(self, module: ModuleType) -> None:
        """There is nothing to run."""


class _StandIn(ModuleType):
    """Has any name that is asked of it."""

    __version__ = "0.0.0"

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return _AbsentType(name, (_Absent,), {"__module__": self.__name__})


class _AbsentType(type):
    """An attribute of an absent class is its name: enough for tables of constants."""

    def __getattr__(cls, name: str) -> str:
        if name.startswith("__"):
            raise AttributeError(name)
        return f"{cls.__module__}.{cls.__name__}.{name}"


class _Absent:
    def __init__(self, *_args: object, **_named: object) -> None:
        absent = type(self)
        msg = f"{absent.__module__}.{absent.__name__} does not exist on a machine without a GPU"
        raise NotImplementedError(msg)

    def __class_getitem__(cls, _item: object) -> type:
        return cls
