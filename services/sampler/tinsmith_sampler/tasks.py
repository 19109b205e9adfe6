"""The work of the batcher: a row that is being drawn; ``scores`` has the other kind.

A task owns what it collects; the batcher owns the room in the cache that a task points to.
V = vocabulary.
"""

from __future__ import annotations

import math
import time
from concurrent.futures import InvalidStateError
from contextlib import suppress
from typing import TYPE_CHECKING, Generic, TypedDict, TypeVar

import numpy as np
import torch

from tinsmith.errors import InvalidRequest, ServerError
from tinsmith_sampler.drawing import draw, uniform
from tinsmith_sampler.engine import Drawn, Generated, Scored, TopTokens

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    from numpy.typing import NDArray

    from tinsmith_sampler.engine import Row, Scoring, StopReason
    from tinsmith_sampler.kv_cache import Extent
    from tinsmith_sampler.lora_layers import Adapter
    from tinsmith_sampler.prompts import Prompt
    from tinsmith_sampler.stopping import Stopper

Result = TypeVar("Result", Generated, Scored)

GROWTH = 64
"""Tokens that a row has room for at first, and that it asks for at least when it needs more."""


class _Collected(TypedDict):
    """Tokens of a row, as the engine's values have them."""

    tokens: NDArray[np.int32]  # [n]
    logprobs: NDArray[np.float32]  # [n]
    topk: TopTokens | None


class Task(Generic[Result]):
    """What the batcher serves: a prompt, its adapter, and the future that somebody awaits."""

    def __init__(
        self,
        request: Row | Scoring,
        adapter: Adapter | None,
        future: Future[Result],
        *,
        needs_from: int,
    ) -> None:
        self.request_id = request.request_id
        self.tokens = request.prompt
        self.adapter = adapter
        self.future: Future[Result] = future
        self.needs_from = needs_from  # logits are needed of the prompt's positions from here on
        self.arrived_s = time.monotonic()
        self.age = 0  # the lower, the longer it has been here; set by the batcher
        self.prompt: Prompt | None = None
        self.cached_tokens = 0  # of the prompt, computed for somebody else

    @property
    def version(self) -> str | None:
        """The version of its adapter."""
        return None if self.adapter is None else self.adapter.version

    def resolve(self, result: Result) -> None:
        """Hand over the result."""
        with suppress(InvalidStateError):  # its owner gave up a moment ago
            self.future.set_result(result)

    def fail(self, error: Exception) -> None:
        """Hand over an error."""
        with suppress(InvalidStateError):
            self.future.set_exception(error)

    def not_finite(self) -> Exception:
        """The error for logits that hold NaN or infinity."""
        return not_finite(self.version)


def not_finite(adapter: str | None) -> Exception:
    """The error for logits that hold NaN or infinity, under this version of an adapter."""
    if adapter is None:
        return ServerError("the base model's logits are not finite; check its files and dtype")
    return InvalidRequest(
        f"adapter {adapter}: the logits under it are not finite; go back to an earlier "
        "checkpoint and lower the learning rate"
    )


class RowTask(Task[Generated]):
    """One continuation. It can be begun anew at any time and draws the same tokens again."""

    def __init__(
        self,
        row: Row,
        adapter: Adapter | None,
        future: Future[Generated],
        new_stopper: Callable[[], Stopper],
    ) -> None:
        super().__init__(row, adapter, future, needs_from=len(row.prompt) - 1)
        self.row = row
        self.extent: Extent | None = None
        self._reserves_all = False
        self._new_stopper = new_stopper
        self._forget()

    def restart(self) -> None:
        """It was sent back: forget what was drawn, and ask for all the room next time."""
        self._reserves_all = True
        self._forget()

    def _forget(self) -> None:
        self.drawn: list[int] = []
        self._logprobs: list[float] = []
        self._topk: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._stopper = self._new_stopper()

    @property
    def is_started(self) -> bool:
        """Whether it has its first token, and so decodes."""
        return bool(self.drawn)

    @property
    def position(self) -> int:
        """Where its newest token goes: the tokens before it are in the cache."""
        return len(self.tokens) + len(self.drawn) - 1

    @property
    def most(self) -> int:
        """The most tokens that it can ever have in the cache."""
        return len(self.tokens) + self.row.max_tokens

    @property
    def first_room(self) -> int:
        """The tokens that it must have room for to begin."""
        return self.most if self._reserves_all else min(self.most, len(self.tokens) + GROWTH)

    @property
    def next_room(self) -> int:
        """The tokens to ask room for when there is none for the newest one."""
        return min(self.most, self.position + 1 + max(GROWTH, len(self.drawn) // 2))

    def advance(self, logits_V: torch.Tensor) -> Generated | None:
        """Draw the next token from these logits; the result when that ends the row."""
        total = float(torch.logsumexp(logits_V, 0))
        if not math.isfinite(total):
            raise self.not_finite()
        row = self.row
        token = draw(logits_V, row.params, uniform(row.seed, len(self.drawn)))
        self.drawn.append(token)
        self._logprobs.append(float(logits_V[token]) - total)
        if row.topk:
            values, ids = torch.topk(logits_V, row.topk)
            self._topk.append((ids, values - total))
        reason = self._stopper.after(token)
        if reason is not None:
            return self._result(reason)
        if row.tell is not None:
            row.tell(self._newest(row.index))
        return None

    def _newest(self, index: int) -> Drawn:
        start = len(self.drawn) - 1
        return Drawn(index=index, start=start, **self._collected(start))

    def _result(self, reason: StopReason) -> Generated:
        return Generated(stop_reason=reason, cached_tokens=self.cached_tokens, **self._collected(0))

    def _collected(self, start: int) -> _Collected:
        topk = None
        if self._topk:
            ids, logprobs = zip(*self._topk[start:], strict=True)
            topk = TopTokens(
                torch.stack(ids).cpu().numpy().astype(np.int32), torch.stack(logprobs).cpu().numpy()
            )
        return _Collected(
            tokens=np.array(self.drawn[start:], dtype=np.int32),
            logprobs=np.array(self._logprobs[start:], dtype=np.float32),
            topk=topk,
        )
