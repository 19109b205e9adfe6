"""Which adapters and requests a server has, and what they are called there.

Neither kind of name is ever used twice there, so that a late answer, an unload that still waits, or
an adapter that an earlier client left behind can never stand for another one.
"""

from __future__ import annotations

import asyncio
import itertools
import secrets
from collections import defaultdict
from contextlib import contextmanager
from typing import TYPE_CHECKING

from tinsmith_sampler.sglang.failures import SglangUnsafe

if TYPE_CHECKING:
    from collections.abc import Iterator


class _Unique:
    """Names that no other client has made."""

    def __init__(self) -> None:
        self._client = secrets.token_hex(4)
        self._count = itertools.count()

    def of(self, name: str) -> str:
        # With an end of its own, so that none begins with another: the server aborts every request
        # whose name begins with what it is given.
        return f"{name}@{self._client}.{next(self._count)};"


class Adapter:
    """A loaded adapter, and how many requests use it."""

    def __init__(self, there: str) -> None:
        self.there = there  # its name in the server
        self._uses = 0
        self._unused = asyncio.Event()
        self._unused.set()

    @contextmanager
    def used(self) -> Iterator[None]:
        """A request runs with it in the block."""
        self._uses += 1
        self._unused.clear()
        try:
            yield
        finally:
            self._uses -= 1
            if not self._uses:
                self._unused.set()

    async def wait_unused(self) -> None:
        """Until no request runs with it."""
        await self._unused.wait()


class AdapterNames:
    """The adapters that a server has loaded for us: a registry of our own.

    The server's is no use: it answers for an adapter that was unloaded, with what it then finds.
    """

    def __init__(self) -> None:
        self._unique = _Unique()
        self._loading: set[str] = set()
        self._loaded: dict[str, Adapter] = {}

    @property
    def loaded(self) -> frozenset[str]:
        """Our names of those that may be used."""
        return frozenset(self._loaded)

    @contextmanager
    def loading(self, name: str) -> Iterator[str]:
        """The server's name for a new one, which is loaded when the block ends well."""
        if name in self._loaded or name in self._loading:
            raise SglangUnsafe(f"adapter {name}: it is loaded already; a name has one content")
        there = self._unique.of(name)
        self._loading.add(name)
        try:
            yield there
            self._loaded[name] = Adapter(there)
        finally:
            self._loading.discard(name)

    def get(self, name: str) -> Adapter:
        """One that may be used; SglangUnsafe when it is not loaded, or no longer."""
        if name not in self._loaded:
            raise SglangUnsafe(f"adapter {name}: it is not loaded here; load it first")
        return self._loaded[name]

    def forget(self, name: str) -> Adapter:
        """From now on no new request can use it."""
        adapter = self.get(name)
        del self._loaded[name]
        return adapter


class RequestNames:
    """The requests that a server has of us; several may have the same name here."""

    def __init__(self) -> None:
        self._unique = _Unique()
        self._running: defaultdict[str, set[str]] = defaultdict(set)

    @contextmanager
    def running(self, rid: str) -> Iterator[str]:
        """The server's name for a request that is there in the block."""
        there = self._unique.of(rid)
        self._running[rid].add(there)
        try:
            yield there
        finally:
            self._running[rid].discard(there)
            if not self._running[rid]:
                del self._running[rid]

    def of(self, rid: str) -> frozenset[str]:
        """The server's names for all of that name."""
        return frozenset(self._running.get(rid, ()))
