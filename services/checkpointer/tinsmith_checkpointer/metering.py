"""Hours of use: how stored results and checkpoints add up. Pure."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from msgspec import structs

from tinsmith import ids
from tinsmith.messages.registry import Usage

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinsmith.bus.facts import Fact
    from tinsmith.messages.checkpoints import Checkpoint

HOUR_S = 3600
NS = 10**9


class Account(NamedTuple):
    """Whom use is counted for: a model's own, or all sampling of a session from a base model."""

    target: str
    owner: str
    session_id: str
    base_model: str

    def empty(self, hour: int) -> Usage:
        """Nothing used in ``hour`` yet."""
        return Usage(hour=hour, **self._asdict())


def account_of(used: Usage) -> Account:
    """Whom ``used`` was counted for."""
    return Account(used.target, used.owner, used.session_id, used.base_model)


def key_of(hour: int, account: Account) -> str:
    """Where an hour of use is kept."""
    pool = ids.pool_token(account.base_model).rpartition("-")[2]
    return f"{hour}-{ids.token(account.target)}-{pool}"


def with_training(used: Usage, facts: Iterable[Fact], *, through: int) -> Usage:
    """``used`` and those of ``facts`` that it does not have; they reach up to ``through``."""
    new = [f.costs for f in facts if f.stream_seq > used.through_log and f.costs is not None]
    return structs.replace(
        used,
        trained_tokens=used.trained_tokens + sum(costs.trained for costs in new),
        checkpoints=used.checkpoints + sum(costs.saved for costs in new),
        through_log=max(used.through_log, through),
    )


def with_sampling(used: Usage, facts: Iterable[Fact], *, through: int) -> Usage:
    """As ``with_training``."""
    new = [f.costs for f in facts if f.stream_seq > used.through_result and f.costs is not None]
    return structs.replace(
        used,
        prefill_tokens=used.prefill_tokens + sum(costs.prefill for costs in new),
        cached_tokens=used.cached_tokens + sum(costs.cached for costs in new),
        sampled_tokens=used.sampled_tokens + sum(costs.sampled for costs in new),
        through_result=max(used.through_result, through),
    )


def with_storage(used: Usage, checkpoints: Iterable[Checkpoint], *, now_ns: int) -> Usage:
    """``used`` and what ``checkpoints`` have taken since it was last counted, in its hour."""
    hour_ns = used.hour * HOUR_S * NS
    through_ns = min(now_ns, hour_ns + HOUR_S * NS)
    added_ns = 0
    for kept in checkpoints:
        since_ns = max(hour_ns, used.through_ns, kept.created_ns)
        until_ns = through_ns if kept.expires_ns is None else min(through_ns, kept.expires_ns)
        added_ns += kept.size_bytes * max(until_ns - since_ns, 0)
    return structs.replace(
        used,
        byte_seconds=used.byte_seconds + added_ns // NS,
        through_ns=max(used.through_ns, through_ns),
    )
