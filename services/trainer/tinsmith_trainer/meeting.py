"""Where the ranks of a trainer find each other: a file of the crew's, or the store of torchrun.

torchrun keeps one store while it starts ranks again and again, and the addresses of ranks that
are dead stay in it. So ranks agree on keys of their own first: the first one draws a token, each
other answers it with a number of its own, and goes on when the first has seen that number.
"""

from __future__ import annotations

import os
import secrets
import sys
import time
from typing import TYPE_CHECKING, Any

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

if TYPE_CHECKING:
    from datetime import timedelta

    from tinsmith_trainer.seat import Seat

_TOKEN = "tinsmith"
_PAUSE_S = 0.05


def store_of(seat: Seat, timeout: timedelta) -> Any:  # noqa: ANN401 - torch does not tell the type
    """A store of these ranks alone; waits until all are there."""
    if not seat.meeting:
        store, _, _ = next(rendezvous("env://", timeout=timeout))
        return dist.PrefixStore(agreed(store, seat), store)  # type: ignore[attr-defined]  # it is public
    # They share a machine, and what they say is nobody else's business.
    os.environ["GLOO_SOCKET_IFNAME"] = "lo" if sys.platform == "linux" else "lo0"
    return dist.FileStore(seat.meeting, seat.size)  # type: ignore[attr-defined]  # it is public


def agreed(store: Any, seat: Seat) -> str:  # noqa: ANN401 - as above
    """A token that just the ranks which are there now know."""
    return _drawn(store, seat.size) if seat.rank == 0 else _heard(store, seat.rank)


def _drawn(store: Any, size: int) -> str:  # noqa: ANN401
    token = secrets.token_hex(8)
    store.set(_TOKEN, token)
    answers = [store.get(f"{token}/{rank}") for rank in range(1, size)]  # waits for each
    store.set(f"{token}/0", b" ".join(answers))
    return token


def _heard(store: Any, rank: int) -> str:  # noqa: ANN401
    mine = secrets.token_hex(8)
    while True:
        token: str = store.get(_TOKEN).decode()  # perhaps of a first rank that is dead
        store.set(f"{token}/{rank}", mine)
        while store.get(_TOKEN).decode() == token:
            if store.check([f"{token}/0"]) and mine.encode() in store.get(f"{token}/0").split():
                return token
            time.sleep(_PAUSE_S)
