"""Seeds: those that clients give, and those derived when they give none.

A derived seed is a pure function of the request's id, so that a request sent again, to any
gateway, asks for exactly the same thing. Session ids are random, and so are these seeds.
"""

from __future__ import annotations

from blake3 import blake3

SEED_RANGE = 2**63 - 1  # exclusive: what every engine and the bus can carry


def seed_for(given: int | None, identifier: str) -> int:
    """``given`` folded into range, or a seed of ``identifier``'s own."""
    if given is None:
        given = int.from_bytes(blake3(b"seed\0" + identifier.encode()).digest(length=8), "little")
    return given % SEED_RANGE
