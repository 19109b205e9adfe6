"""The seals of all runs: their keys in the registry, wrapped, and what was forgotten."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Protocol, TypeVar

from tinsmith import ids
from tinsmith.errors import SealBroken, StartupError, TinsmithError
from tinsmith.messages import table
from tinsmith.messages.base import Message
from tinsmith.messages.registry import ForgottenRun, RunKey
from tinsmith.messages.registry import MasterKey as MasterKeyEntry
from tinsmith.paths import DataDir
from tinsmith.sealing.config import SealingConfig
from tinsmith.sealing.master import KeySource, MasterKey
from tinsmith.sealing.seal import PLAIN, ClosedSeal, KeySeal, Seal

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from tinsmith.config import Config
    from tinsmith.messages.table import Entity

M = TypeVar("M", bound=Message)

IN_USE = "current"  # the registry's key of the one master key


class Watch(Protocol):
    """What ``Table.watch`` gives."""

    async def close(self) -> None:
        """End it."""


class Table(Protocol[M]):
    """What is needed of ``tinsmith.bus.Table``."""

    async def get(self, key: str) -> M | None:
        """The entry."""

    async def create(self, key: str, value: M) -> M:
        """Set it unless it exists; the entry that holds."""

    async def erase(self, key: str) -> None:
        """Remove it, and overwrite its bytes on the disk."""

    async def watch(self, on_change: Callable[[str, M | None], None]) -> Watch:
        """Hear of all entries and changes."""


class Registry(Protocol):
    """What is needed of ``tinsmith.bus.Bus``."""

    def table(self, entity: Entity[M]) -> Table[M]:
        """The table of ``entity``."""


class Seals:
    """Gives each run its seal. Services get theirs by ``serving``."""

    def __init__(self, registry: Registry, config: Config) -> None:
        settings = config.section(SealingConfig)
        self._is_enabled = settings.enabled
        file = DataDir(config.data_dir).master_key
        self._source = KeySource(settings.master_key_command, file)
        self._keys = registry.table(table.RUN_KEYS)
        self._forgotten = registry.table(table.FORGOTTEN_RUNS)
        self._masters = registry.table(table.MASTER_KEYS)
        self._found: MasterKey | None = None
        self._known: dict[str, Seal] = {}  # by subject token

    @classmethod
    @asynccontextmanager
    async def serving(cls, registry: Registry, config: Config) -> AsyncIterator[Seals]:
        """For a service: has the master key, and hears of what is forgotten elsewhere.

        Raises:
            StartupError: the master key cannot be had, or is not the installation's.
        """
        seals = cls(registry, config)
        if seals._is_enabled:
            await seals._require_master()
        watch = await seals._forgotten.watch(seals._on_forgotten)
        try:
            yield seals
        finally:
            await watch.close()

    async def of(self, model_id: str) -> Seal:
        """The seal of a run; a closed one (see ``Seal.why_closed``) if it cannot be opened here.

        For a run without a key it is ``PLAIN``. What is forgotten later closes it.

        Raises:
            BrokerUnavailable: the registry cannot be read.
        """
        token = ids.token(model_id)
        if (known := self._known.get(token)) is not None:
            return known
        seal = await self._read(model_id)
        # Another task may have been first, and it may have been forgotten meanwhile.
        return self._known.setdefault(token, seal)

    async def make(self, model_id: str) -> Seal:
        """The seal of a run that is about to be created; with sealing off, ``PLAIN``.

        Must come before anything else of the run is seen: others keep what ``of`` said first.
        """
        if not self._is_enabled:
            return await self.of(model_id)
        return await self.adopt(model_id, KeySeal.new_key())

    async def adopt(self, model_id: str, key: bytes) -> Seal:
        """Give a run that comes from elsewhere its ``key``, unless it has one or was forgotten."""
        token = ids.token(model_id)
        if await self._forgotten.get(token) is None:
            master = await self._require_master()
            entry = RunKey(
                model_id=model_id,
                created_ns=time.time_ns(),
                wrapped=master.wrap(model_id, key),
                fingerprint=master.fingerprint,
            )
            await self._keys.create(token, entry)
        return await self.of(model_id)

    async def forgotten(self, model_id: str) -> ForgottenRun | None:
        """When and why the run was forgotten; None if it was not."""
        return await self._forgotten.get(ids.token(model_id))

    async def has_key(self, model_id: str) -> bool:
        """Whether the registry has a key of the run."""
        return await self._keys.get(ids.token(model_id)) is not None

    async def forget(self, model_id: str, reason: str, *, at_ns: int | None = None) -> ForgottenRun:
        """Destroy the run's key; what was forgotten before keeps its date.

        ``at_ns`` is when, for a log that comes from elsewhere and was forgotten there.
        """
        token = ids.token(model_id)
        at_ns = time.time_ns() if at_ns is None else at_ns
        entry = ForgottenRun(model_id=model_id, forgotten_ns=at_ns, reason=reason)
        # First the mark: whoever finds no key must find why. A repeat erases what was left.
        entry = await self._forgotten.create(token, entry)
        await self._keys.erase(token)
        self._on_forgotten(token, entry)
        return entry

    def _on_forgotten(self, token: str, entry: ForgottenRun | None) -> None:
        if entry is None:
            return
        closed = ClosedSeal.of(entry)
        known = self._known.get(token)
        if isinstance(known, KeySeal):
            known.revoke(closed.why_closed)
        self._known[token] = closed

    async def _read(self, model_id: str) -> Seal:
        token = ids.token(model_id)
        entry = await self._keys.get(token)
        # Asked last: a key that was erased a moment ago has left its mark by now.
        if (gone := await self._forgotten.get(token)) is not None:
            return ClosedSeal.of(gone)
        if entry is None:
            return PLAIN
        try:
            return KeySeal((await self._master(entry)).unwrap(model_id, entry.wrapped))
        except TinsmithError as exc:
            return ClosedSeal(SealBroken(str(exc)))

    async def _master(self, entry: RunKey) -> MasterKey:
        """The master key that has wrapped ``entry``."""
        master = self._found = self._found or await asyncio.to_thread(self._source.find)
        if master is None:
            raise SealBroken(
                f"the key of run {entry.model_id} is wrapped by master key {entry.fingerprint}, "
                f"which is not on this machine; copy it to {self._source}, or set "
                "sealing.master_key_command"
            )
        if master.fingerprint != entry.fingerprint:
            raise SealBroken(_disagreement(self._source, master, entry.fingerprint))
        return master

    async def _require_master(self) -> MasterKey:
        """The master key of the installation; the first service decides which that is.

        Raises:
            StartupError: it is not to be had on this machine.
        """
        if self._found is not None:
            return self._found
        # In this order: who enters a key has made its file before, if it is another service here.
        in_use = await self._masters.get(IN_USE)
        master = await asyncio.to_thread(self._source.find)
        if master is None and in_use is None:
            await asyncio.to_thread(self._source.make)
            master = await asyncio.to_thread(self._source.find)
        if master is None:
            told = f"{in_use.fingerprint}, which" if in_use else "one that"
            raise StartupError(
                f"sealing: this installation uses master key {told} is not on this machine; copy "
                f"{self._source} from a machine that has it (mode 0600), or set "
                "sealing.master_key_command"
            )
        mine = MasterKeyEntry(fingerprint=master.fingerprint)
        in_use = in_use or await self._masters.create(IN_USE, mine)
        if in_use.fingerprint != master.fingerprint:
            raise StartupError(_disagreement(self._source, master, in_use.fingerprint))
        self._found = master
        return master


def _disagreement(source: KeySource, master: MasterKey, wanted: str) -> str:
    return (
        f"sealing: {source} has master key {master.fingerprint}, but this installation uses "
        f"{wanted}; give every service the same key, by file or by sealing.master_key_command"
    )
