"""The part of ``tinsmith gc`` on logs: what the broker has of runs, why, and what is pruned."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, NamedTuple

import msgspec

from tinsmith.logbook.samples import is_session

if TYPE_CHECKING:
    from collections.abc import Mapping

    from tinsmith.bus import Bus
    from tinsmith_checkpointer.pruning import LogPlan

WHY = {
    "policy": "[retention] logs keeps them, for ever or for now",
    "living": "of runs whose session lives, or that have requests to answer",
    "checkpoints": "checkpoints name a place in them, until they are deleted or expire",
    "samplers": "sampling sessions that live draw from their weights",
    "uncounted": "what they used is not counted yet: a checkpointer does that",
    "elsewhere": "imported: of no run of this installation",
    "sessions": "samples from base models: they go by bus.sample_log_days",
    "due": "ended longer ago than logs are kept, and nothing needs them",
    "begun": "their pruning broke off",
    "pruned": "what came after they were pruned",
}
PRUNED = ("due", "begun", "pruned")


class LogClass(msgspec.Struct):
    """Logs with one fate."""

    name: str
    fate: Literal["kept", "pruned"]
    logs: int
    entries: int  # with samples, and what was published of weights
    bytes: int  # before the broker compresses them
    why: str


class Held(NamedTuple):
    """What the broker has of one log."""

    entries: int
    size: int  # bytes


async def held(bus: Bus) -> dict[str, Held]:
    """By run, or by session what was sampled from base models. Raises BrokerUnavailable."""
    found: dict[str, Held] = {}
    async for owner, size in bus.pruning.sizes():
        before = found.get(owner, Held(0, 0))
        found[owner] = Held(before.entries + 1, before.size + size)
    return found


def classes(found: Mapping[str, Held], plan: LogPlan, *, has_policy: bool) -> list[LogClass]:
    """What is to become of what was ``found``."""
    fates = {owner: _fate_of(owner, plan, has_policy=has_policy) for owner in found}
    made = []
    for name, why in WHY.items():
        of_it = [found[owner] for owner, fate in fates.items() if fate == name]
        if of_it or name == "due":
            made.append(
                LogClass(
                    name=name,
                    fate="pruned" if name in PRUNED else "kept",
                    logs=len(of_it),
                    entries=sum(one.entries for one in of_it),
                    bytes=sum(one.size for one in of_it),
                    why=why,
                )
            )
    return made


def _fate_of(owner: str, plan: LogPlan, *, has_policy: bool) -> str:
    if (fate := plan.fates.get(owner)) is not None:
        return fate
    if is_session(owner):
        return "sessions"
    return "elsewhere" if has_policy else "policy"
