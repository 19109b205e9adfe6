"""What owners have used, by their keys: in the last day, and in all."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinsmith.messages.registry import Usage
    from tinsmith_gateway.registry import Registry

DAY_H = 24
COUNTED = (
    *("trained_tokens", "prefill_tokens", "cached_tokens", "sampled_tokens"),
    *("checkpoints", "byte_seconds"),
)


def spending(registry: Registry, owner: str | None) -> list[dict[str, Any]]:
    """Of one owner, or of all: the greatest user first."""
    used = registry.usage if owner is None else registry.usage.group(owner)
    by_owner: dict[str, list[Usage]] = {} if owner is None else {owner: []}
    for one in used:
        by_owner.setdefault(one.owner, []).append(one)
    since = int(time.time()) // 3600 - DAY_H
    found = [
        {
            "owner": each,
            **_keys(registry, each),
            "day": _sums(one for one in hours if one.hour > since),
            "all": _sums(hours),
        }
        for each, hours in by_owner.items()
    ]
    return sorted(found, key=lambda one: -one["all"]["trained_tokens"])


def _keys(registry: Registry, owner: str) -> dict[str, Any]:
    """Name, and the ends of its keys; a configured key has neither."""
    keys = registry.api_keys.group(owner)
    ends = sorted(key.last_four for key in keys if key.revoked_ns is None)
    return {"name": next((key.name for key in keys), ""), "keys": ends}


def _sums(hours: Iterable[Usage]) -> dict[str, int]:
    sums = dict.fromkeys(COUNTED, 0)
    for one in hours:
        for name in COUNTED:
            sums[name] += getattr(one, name)
    return sums
