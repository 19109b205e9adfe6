"""Stretches of lists, newest first, and what a query asks for."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

from tinsmith.errors import InvalidRequest
from tinsmith_gateway.wire.labels import check_project

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from aiohttp import web

MAX_LIMIT = 1000
MAX_OFFSET = 2**53 - 1  # what every reader of JSON can hold


class Page(NamedTuple):
    """A stretch of a list."""

    offset: int
    limit: int

    def cut(self, items: Sequence[Any]) -> Sequence[Any]:
        """The items on the page."""
        return items[self.offset : self.offset + self.limit]

    def cursor(self, total: int) -> dict[str, int]:
        """Where the page lies in a list of ``total`` items."""
        return {"offset": self.offset, "limit": self.limit, "total_count": total}


def page_of(request: web.Request, *, default: int) -> Page:
    """The page that is asked for; InvalidRequest for one that cannot be."""
    offset = _number(request, "offset", 0)
    limit = _number(request, "limit", default)
    if not (0 <= offset <= MAX_OFFSET and 1 <= limit <= MAX_LIMIT):
        raise InvalidRequest(
            f"offset, limit: {offset:.6g}, {limit:.6g} are outside 0 to {MAX_OFFSET}, and 1 to "
            f"{MAX_LIMIT}; ask for a page within"
        )
    return Page(offset, limit)


def project_of(request: web.Request) -> str | None:
    """The project to filter by, if any."""
    project = request.query.get("project_id")
    return check_project(project) if project else None


def newest_first(items: Iterable[Any]) -> list[Any]:
    """By the time at which each was made."""
    return sorted(items, key=lambda item: item.created_ns, reverse=True)


def _number(request: web.Request, name: str, default: int) -> int:
    text = request.query.get(name, str(default))
    try:
        return int(text)
    except ValueError:
        raise InvalidRequest(f"{name}: {text[:40]!r} is not a whole number") from None
