"""The slices of a model's state, told to the first rank beside what the ranks compute.

The first rank reads a state for its digest and for copies, on threads of its own, while passes run
and change nothing of it (``readings``). For that the ranks have a second line, on which each of
the others answers on a thread of its own. Nothing is ever whole anywhere but where it is read.
"""

from __future__ import annotations

import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch

from tinsmith.errors import NotFound

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import Tensor

    from tinsmith_trainer.ranks import Ranks
    from tinsmith_trainer.slices import Slices
    from tinsmith_trainer.trainable import Trainable

_PIECE = 1 << 22  # numbers that are sent at a time
_STOP, _TELL = 0, 1


class Telling:
    """One rank's end of the second line."""

    def __init__(self, ranks: Ranks, slices: Slices) -> None:
        """Made by all ranks at once."""
        self._ranks = ranks
        self._slices = slices
        self._line = ranks.line()
        self.unread = threading.Lock()
        """Held while the state is read: whoever changes it must have this."""
        self.tenant: Trainable | None = None
        """Whose state it is, which has the slices of this rank."""

    def read(self, tenant: Trainable) -> Iterator[Tensor]:
        """Of the first rank: weights and both moments from end to end, in pieces on the CPU.

        May be called on any thread.

        Raises:
            NotFound: the tenant is no longer here.
        """
        with self.unread:
            if self.tenant is not tenant:
                raise NotFound("model_id: the model was dropped, or replaced, before it was read")
            is_over = False
            try:
                for rank in range(1, self._ranks.size):
                    self._ranks.send(torch.tensor([_TELL]), rank, self._line)
                yield from self._pieces(tenant)
                is_over = True
            finally:
                if not is_over:  # and the others go on telling
                    self._ranks.fail("a state was not read to its end")

    def stop(self) -> None:
        """Of the first rank: nothing more will be read; who still waits for it is told so."""
        with self.unread:
            self.tenant = None
            for rank in range(1, self._ranks.size):
                self._ranks.send(torch.tensor([_STOP]), rank, self._line)

    @contextmanager
    def answering(self) -> Iterator[None]:
        """Of another rank: tell what it is asked for, up to the end of the first one's ``stop``."""
        thread = threading.Thread(target=self._answer, name="telling", daemon=True)
        thread.start()
        yield
        thread.join()

    def _pieces(self, tenant: Trainable) -> Iterator[Tensor]:
        for array in _arrays(tenant):
            yield from (one.cpu() for one in _split(array))
            for rank in range(1, self._ranks.size):
                where = self._slices.of(rank)
                for piece in _split(torch.empty(where.stop - where.start, device="meta")):
                    received = torch.empty(len(piece))
                    self._ranks.receive(received, rank, self._line)
                    yield received

    def _answer(self) -> None:
        asked = torch.empty(1, dtype=torch.int64)
        with self._ranks.in_step():
            while True:
                self._ranks.receive(asked, 0, self._line)
                if int(asked) == _STOP:
                    return
                if self.tenant is None:
                    msg = "there is no state to tell of"
                    raise RuntimeError(msg)
                for array in _arrays(self.tenant):
                    for piece in _split(array):
                        self._ranks.send(piece.cpu(), 0, self._line)


def _arrays(tenant: Trainable) -> tuple[Tensor, Tensor, Tensor]:
    return tenant.weights.detach(), tenant.optimizer.exp_avg, tenant.optimizer.exp_avg_sq


def _split(array: Tensor) -> tuple[Tensor, ...]:
    return torch.split(array, _PIECE) if len(array) else ()
