"""What the ranks of one trainer say to each other: by torch.distributed, and without pickle.

The first rank tells the others what to do, and all do the same in lock-step. Every collective is
joined by every rank, whether or not it has anything to do. A rank that cannot reach another, or
finds that it has come to something else, ends its process at once: no result of it may be told. The
trainer then starts again, and its models are rebuilt from their logs.
"""

from __future__ import annotations

import os
import sys
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, NoReturn, TypeVar

import msgspec
import numpy as np
import structlog
import torch
import torch.distributed as dist

from tinsmith.errors import TinsmithError
from tinsmith.lifeline import EXIT_FAILED
from tinsmith.messages.base import Failed
from tinsmith.messages.failures import to_exception, to_failed
from tinsmith.messages.ops import Frame
from tinsmith_trainer.meeting import store_of
from tinsmith_trainer.microbatch import Scored
from tinsmith_trainer.parts import Made

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from torch import Tensor

    from tinsmith_trainer.parts import Part
    from tinsmith_trainer.seat import Seat

R = TypeVar("R")

_CHUNK = 1 << 24  # floats that are added up at a time: what it takes beside the gradient
_FOREVER = timedelta(days=10_000)  # a rank waits for its next command as long as nobody asks


class _Said(msgspec.Struct, frozen=True):
    """What came of something on one rank."""

    failed: Failed | None = None
    scored: tuple[tuple[bytes, bytes], ...] = ()  # per row: log-probabilities, terms; float32
    frame: Frame | None = None
    digest: int = 0


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(_Said).decode


class Ranks:
    """This rank among the others of its trainer; made once per process, used by one thread."""

    def __init__(self, seat: Seat, device: torch.device) -> None:
        """Waits for all others."""
        self.rank = seat.rank
        self.size = seat.size
        self.idle: Callable[[Part], None] = lambda _: None
        """What a rank does that has no part of its own, with the first one."""
        self._shared: Exception | None = None  # the last error that all ranks know of
        self._log = structlog.get_logger("tinsmith.ranks").bind(rank=seat.rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
            store=store_of(seat, _FOREVER),
            rank=seat.rank,
            world_size=seat.size,
            timeout=_FOREVER,
        )

    @property
    def is_first(self) -> bool:
        """Whether this is the one that tells the others what to do."""
        return self.rank == 0

    def tell(self, data: bytes) -> None:
        """Of the first rank: send ``data`` to all others, each of which must ``hear`` it."""
        self._broadcast(torch.tensor([len(data)]))
        self._broadcast(_tensor(data))

    def hear(self) -> bytes:
        """What the first rank tells next."""
        size = torch.zeros(1, dtype=torch.int64)
        self._broadcast(size)
        data = torch.empty(int(size), dtype=torch.uint8)
        self._broadcast(data)
        return data.numpy().tobytes()

    def exchange(self, data: bytes) -> list[bytes]:
        """What each rank says, in their order."""
        sizes = [torch.zeros(1, dtype=torch.int64) for _ in range(self.size)]
        self._collective(dist.all_gather, sizes, torch.tensor([len(data)]))
        longest = max(map(int, sizes))
        mine = torch.zeros(longest, dtype=torch.uint8)
        mine[: len(data)] = _tensor(data)
        said = [torch.empty_like(mine) for _ in range(self.size)]
        self._collective(dist.all_gather, said, mine)
        return [one.numpy()[: int(n)].tobytes() for one, n in zip(said, sizes, strict=True)]

    def in_turn(self, call: Callable[[], R]) -> R:
        """What ``call`` returns, which one rank after the other makes; it may not fail."""
        for _ in range(self.rank):
            self.exchange(b"next")
        done = call()
        for _ in range(self.rank, self.size):
            self.exchange(b"next")
        return done

    def agreed(self, call: Callable[[], R]) -> R:
        """See ``Team``."""
        done, error = _tried(call)
        self._settled(_Said(failed=_failed(error)), error)
        return done  # type: ignore[return-value]  # there was no error

    def made(self, parts: Sequence[Part], make: Callable[[Part], Made]) -> list[Made]:
        """See ``Team``; a rank without a part waits for the others."""
        if self.rank < len(parts):
            mine, error = _tried(lambda: make(parts[self.rank]))
        else:
            mine, error = _tried(lambda: self.idle(parts[0]))
        said = self._settled(_said_of(mine, error), error)
        return [_made_of(one, part) for one, part in zip(said, parts, strict=False)]

    def changed(self, call: Callable[[], R], state: Callable[[], Iterable[Tensor]]) -> R:
        """What ``call``, which changes a model, returns; it must come to the same on every rank.

        ``state`` gives what it has become, numbers of 4 or 2 bytes.
        """
        done, error = _tried(call)
        mine = _Said(failed=_failed(error), digest=_sum_of_bits(state()))
        said = [_decode(data) for data in self.exchange(_encode(mine))]
        if any(one != said[0] for one in said):
            self.fail("the ranks came to different states", outcomes=[repr(one) for one in said])
        if error is not None:
            self._shared = error
            raise error
        return done  # type: ignore[return-value]  # there was no error

    @torch.no_grad()
    def add_up(self, sums: Tensor) -> None:
        """See ``Team``. Nothing but its order decides the bits: no library does the adding."""
        for chunk in torch.split(sums, _CHUNK):
            share = -(-len(chunk) // self.size)
            mine = chunk.new_zeros(share * self.size)
            mine[: len(chunk)] = chunk
            theirs = torch.empty_like(mine)
            self._collective(dist.all_to_all_single, theirs, mine)
            total, *others = theirs.view(self.size, share)
            for other in others:
                total += other
            whole = list(mine.view(self.size, share).unbind(0))
            self._collective(dist.all_gather, whole, total)
            chunk.copy_(mine[: len(chunk)])

    def swap(self, theirs: Tensor, mine: Tensor) -> None:
        """Row r of ``theirs`` becomes what rank r has in the row of this rank."""
        self._collective(dist.all_to_all_single, theirs, mine)

    def spread(self, rows: Tensor, mine: Tensor) -> None:
        """Row r of ``rows`` becomes what rank r has as ``mine``."""
        self._collective(dist.all_gather, list(rows.unbind(0)), mine)

    def deal(self, mine: Tensor, rows: Tensor | None) -> None:
        """``mine`` becomes this rank's row of those that the first rank gives."""
        self._collective(dist.scatter, mine, None if rows is None else list(rows.unbind(0)))

    def line(self) -> dist.ProcessGroup:
        """A connection beside this one, for one more thread; made by all ranks at once."""
        line: dist.ProcessGroup = dist.new_group(backend="gloo", timeout=_FOREVER)
        return line

    def send(self, tensor: Tensor, rank: int, line: dist.ProcessGroup) -> None:
        """To ``rank``, on the CPU."""
        self._collective(dist.send, tensor, rank, line)

    def receive(self, tensor: Tensor, rank: int, line: dist.ProcessGroup) -> None:
        """Fill ``tensor`` with what ``rank`` sends."""
        self._collective(dist.recv, tensor, rank, line)

    @contextmanager
    def in_step(self) -> Iterator[None]:
        """All ranks do what is in the block: one that cannot is waited for by nobody, and ends."""
        try:
            yield
        except TinsmithError:  # which all ranks come to, from what all of them have
            raise
        except Exception as error:  # noqa: BLE001 - whatever it is
            self.fail("this rank alone has failed", exc_info=error)

    def gather(self, whole: Tensor, mine: Tensor, group: dist.ProcessGroup) -> None:
        """Fill ``whole`` with every rank's ``mine``, in their order."""
        self._collective(dist.all_gather_single, whole, mine, group)

    def check_shared(self, error: Exception) -> None:
        """Ends the process for an error that this rank had alone: the others wait for it."""
        if error is not self._shared and not isinstance(error, TinsmithError):
            self.fail("this rank alone has failed", exc_info=error)

    def fail(self, why: str, **details: object) -> NoReturn:
        """End this process, and with it the trainer."""
        self._log.error(why, **details)
        sys.stderr.flush()
        os._exit(EXIT_FAILED)

    def _settled(self, mine: _Said, error: Exception | None) -> list[_Said]:
        """What all say, or the first rank's error that has one."""
        said = [_decode(data) for data in self.exchange(_encode(mine))]
        first = next((rank for rank, one in enumerate(said) if one.failed is not None), None)
        if first is None:
            return said
        if error is not None and not self.is_first and not isinstance(error, TinsmithError):
            self._log.error("failed", exc_info=error)  # the first rank is told no details
        if error is None or first != self.rank:
            error = to_exception(said[first].failed or Failed(category="server", message=""))
        self._shared = error
        raise error

    def _broadcast(self, tensor: Tensor) -> None:
        self._collective(dist.broadcast, tensor, 0)

    def _collective(self, operation: Callable[..., object], *arguments: object) -> None:
        try:
            operation(*arguments)
        except RuntimeError as lost:
            self.fail("another rank is gone", error=str(lost).splitlines()[0])


def _tried(call: Callable[[], R]) -> tuple[R | None, Exception | None]:
    try:
        return call(), None
    except Exception as exc:  # noqa: BLE001 - handed to all ranks
        return None, exc


def _failed(error: Exception | None) -> Failed | None:
    return None if error is None else to_failed(error)


def _said_of(made: Made | None, error: Exception | None) -> _Said:
    if made is None:
        return _Said(failed=_failed(error))
    rows = ((one.logprobs.tobytes(), one.values.tobytes()) for one in made.scored)
    return _Said(scored=tuple(rows), frame=made.frame)


def _made_of(said: _Said, part: Part) -> Made:
    arrays = (
        [np.frombuffer(data, np.float32).reshape(row.targets.shape) for data in both]
        for both, row in zip(said.scored, part.rows, strict=True)
    )
    return Made([Scored(logprobs, values) for logprobs, values in arrays], said.frame)


def _sum_of_bits(tensors: Iterable[Tensor]) -> int:
    """Of equal tensors it is equal, on any device and in any order of adding."""
    bits = {2: torch.int16, 4: torch.int32}
    flat = (one.detach().view(bits[one.element_size()]) for one in tensors)
    return sum(int(one.sum(dtype=torch.int64)) for one in flat)


def _tensor(data: bytes) -> Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else torch.empty(0).byte()
