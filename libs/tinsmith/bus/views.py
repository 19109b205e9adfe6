"""A registry table in memory: rebuilt at start, kept current by a watch, grouped for lists."""

from __future__ import annotations

from typing import TYPE_CHECKING, Generic, TypeVar

from tinsmith.messages.base import Message

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from tinsmith.bus.subscription import Subscription
    from tinsmith.bus.table import Table

M = TypeVar("M", bound=Message)


class View(Generic[M]):
    """The entries of one table; ``group_of`` names the group that an entry is listed in."""

    def __init__(self, table: Table[M], group_of: Callable[[M], str]) -> None:
        self.table = table
        self._group_of = group_of
        self._values: dict[str, M] = {}
        self._groups: dict[str, dict[str, M]] = {}

    async def watch(self) -> Subscription:
        """Follows the table; returns when all present entries are in."""
        return await self.table.watch(self.apply)

    def apply(self, key: str, value: M | None) -> None:
        """One change; None is a deletion."""
        old = self._values.pop(key, None)
        if old is not None:
            self._leave_group(key, self._group_of(old))
        if value is not None:
            self._values[key] = value
            self._groups.setdefault(self._group_of(value), {})[key] = value

    async def get(self, key: str) -> M | None:
        """The entry; asks the broker when the watch has not brought it yet."""
        found = self._values.get(key)
        return found if found is not None else await self.table.get(key)

    def peek(self, key: str) -> M | None:
        """The entry, if the watch has brought it."""
        return self._values.get(key)

    def entries(self) -> dict[str, M]:
        """All that the watch has brought, by their keys; a copy."""
        return dict(self._values)

    def group(self, name: str) -> tuple[M, ...]:
        """The entries of one group, in no order."""
        return tuple(self._groups.get(name, {}).values())

    def __iter__(self) -> Iterator[M]:
        return iter(tuple(self._values.values()))

    def _leave_group(self, key: str, name: str) -> None:
        members = self._groups[name]
        del members[key]
        if not members:
            del self._groups[name]
