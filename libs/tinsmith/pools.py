"""Pools of samplers, and the shares that their work is cut into so that like goes with like.

Several samplers of one base model that are alike (engine, dtype, device) are a pool; its label is
part of every subject of its work. A pool's work is cut into a fixed number of shares. Which share
a request is in follows from whose weights it draws from and how its prompt begins, so that one
sampler finds them in its memory; and which sampler prefers which share, from the samplers that are
alive (rendezvous hashing). Nobody owns a share, and nothing is wrong if another takes from it.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

from blake3 import blake3

from tinsmith.errors import InvalidRequest

if TYPE_CHECKING:
    from collections.abc import Iterable

    from tinsmith.messages.sampling import Sample

SHARES = 8
"""Of each pool. A broker's consumer for each costs little, and many more would be of no use."""
SHARES_OF_WEIGHTS = 2
"""Of one run's requests: its adapter is in the memory of as many samplers, and only with more
work than these can do in that of others. Requests to the base model are in all shares."""
PREFIX_TOKENS = 64
"""Prompts that begin alike for so long are in the same share."""
DEFAULT_POOL = ""
MAX_POOL = 32
POOL_PATTERN = f"^([a-z0-9][a-z0-9_]{{0,{MAX_POOL - 1}}})?$"

_TOKEN_BYTES = 4


def check_pool(text: object, field: str) -> str:
    """``text`` itself; InvalidRequest when it cannot be the label of a pool."""
    if isinstance(text, str) and re.fullmatch(POOL_PATTERN, text) is not None:
        return text
    raise InvalidRequest(
        f"{field}: {str(text)[:80]!r} is not a label of samplers; it has up to {MAX_POOL} "
        "lower-case letters, digits and '_'"
    )


def shares(pool: str) -> tuple[str, ...]:
    """All shares of a pool, each one subject token."""
    return tuple(_share(pool, number) for number in range(SHARES))


def pool_of(share: str) -> str:
    """The label of the pool that a share is of."""
    return share.rpartition("-")[0]


def share_of(pool: str, sample: Sample) -> str:
    """The share of ``pool`` that a request is in: the same whenever it is asked for."""
    start = sample.prompt[: PREFIX_TOKENS * _TOKEN_BYTES]
    if sample.adapter is None:
        return _share(pool, _hash(sample.base_model.encode(), start) % SHARES)
    # Of a run, not of a version: its next version goes where its last one was.
    weights = (sample.adapter.model_id or sample.adapter.version).encode()
    chosen = _hash(start) % SHARES_OF_WEIGHTS
    return _share(pool, (_hash(weights) + chosen * (SHARES // SHARES_OF_WEIGHTS)) % SHARES)


def rank(share: str, member: str, members: Iterable[str]) -> int:
    """How many of ``members`` come before ``member`` for a share; the same to all who ask."""
    weight = _weight(share, member)
    return sum(_weight(share, other) > weight for other in members if other != member)


def _share(pool: str, number: int) -> str:
    return f"{pool}-{number}" if pool else str(number)


def _weight(share: str, member: str) -> tuple[int, str]:
    return _hash(share.encode(), member.encode()), member


def _hash(*parts: bytes) -> int:
    hasher = blake3()
    for part in parts:
        hasher.update(len(part).to_bytes(8, "little"))
        hasher.update(part)
    return int.from_bytes(hasher.digest(8), "little")
