"""What the next passes compute: continuous batching.

A round computes some prompt tokens and one token of every started row, so that long prompts hold
rows up only a little; rows join and leave between any two rounds. A fault ends the tasks of the
pass in which it happens, and no others.

Not thread-safe: the engine's thread owns it.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import structlog

from tinsmith.errors import Gone, ServerError, TinsmithError
from tinsmith.metrics import names as metrics
from tinsmith_sampler.passes import Piece
from tinsmith_sampler.scores import ScoreTask
from tinsmith_sampler.seating import Seating

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from tinsmith_sampler.model import ServedModel
    from tinsmith_sampler.prompts import Prompt
    from tinsmith_sampler.seating import AnyTask
    from tinsmith_sampler.tasks import RowTask

_log = structlog.get_logger(__name__)

_LEAST_COST = 32
"""A pass costs at least as much as one over so many tokens: the weights have to be read."""


class Batcher:
    """The tasks of one model, advanced round by round."""

    def __init__(self, model: ServedModel, *, max_rows: int, prefill_tokens: int) -> None:
        self._model = model
        self._seating = Seating(model.cache, max_rows)
        self._prefill_tokens = prefill_tokens

    @property
    def running(self) -> int:
        """Tasks that are seated."""
        return len(self._seating.seated)

    @property
    def is_idle(self) -> bool:
        """Whether there is nothing to do."""
        return next(iter(self._seating), None) is None

    def submit(self, task: AnyTask) -> None:
        """Put a task at the end of the queue."""
        self._seating.arrive(task)

    def abort(self, request_id: str) -> None:
        """End the tasks of a request; their owners get Gone."""
        gone = Gone(f"request_id: {request_id} was aborted")
        self._end([task for task in self._seating if task.request_id == request_id], gone)

    def start_anew(self, reason: str) -> None:
        """Forget what was computed with weights that are to change; tasks end with ``reason``."""
        self._end(list(self._seating), ServerError(reason))
        self._seating.prompts.evict_all()

    def step(self) -> None:
        """One round: seat whom there is room for, compute prompts, draw a token of each row."""
        for task in self._seating:
            if task.future.cancelled():
                self._seating.leave(task)
        self._seating.seat_waiting()
        self._compute_prompts()
        self._start_tasks()
        self._decode()

    def _compute_prompts(self) -> None:
        """Compute about ``prefill_tokens`` tokens of prompts, in the order of the seats."""
        left = self._prefill_tokens
        while left > 0 and (prompts := self._next_prompts(left)):
            left -= max(_LEAST_COST, self._compute(prompts))

    def _next_prompts(self, budget: int) -> dict[Prompt, AnyTask]:
        """Prompts for one pass, each with a task that needs it; at least one if there is any."""
        budget = min(budget, self._model.shape.prompt_most)
        chosen: dict[Prompt, AnyTask] = {}
        for task in self._seating.seated:
            prompt = task.prompt
            if prompt is None or prompt.is_filled or prompt in chosen:
                continue
            stretch = prompt.next_stretch()
            budget -= stretch.stop - stretch.start
            if chosen and budget < 0:
                break
            chosen[prompt] = task
        return chosen

    def _compute(self, prompts: dict[Prompt, AnyTask]) -> int:
        """One pass over a stretch of each prompt; returns how many tokens that were."""
        pieces = [_stretch(prompt, task) for prompt, task in prompts.items()]
        try:
            logits = self._model.prefill(pieces)
        except Exception as error:  # noqa: BLE001  whatever torch raises ends these tasks only
            for prompt in prompts:
                self._seating.prompts.discard(prompt)
                self._fail(self._users(prompt), error)
            return 0
        for prompt, piece, logits_nV in zip(prompts, pieces, logits, strict=True):
            self._take(prompt, piece, logits_nV)
        return sum(len(piece.tokens) for piece in pieces)

    def _take(self, prompt: Prompt, piece: Piece, logits_nV: torch.Tensor) -> None:
        prompt.filled += len(piece.tokens)
        if prompt.filled == len(prompt.tokens):
            prompt.last_logits = logits_nV[-1].clone()  # not a view of all the others
        for task in self._users(prompt):
            if isinstance(task, ScoreTask) and len(piece.wanted):
                self._score(task, piece.position + int(piece.wanted[0]), logits_nV)

    def _users(self, prompt: Prompt) -> list[AnyTask]:
        return [task for task in self._seating.seated if task.prompt is prompt]

    def _score(self, task: ScoreTask, position: int, logits_nV: torch.Tensor) -> None:
        try:
            task.take(position, logits_nV)
        except Exception as error:  # noqa: BLE001  one task's fault is not its neighbours'
            self._fail([task], error)

    def _start_tasks(self) -> None:
        """Where the prompt is computed, a score is done and a row gets its first token."""
        for task in self._seating:
            prompt = task.prompt
            if prompt is None or prompt.last_logits is None:
                continue
            if isinstance(task, ScoreTask):
                self._seating.leave(task)
                task.resolve(task.result())
            elif task.extent is not None:
                self._seating.begin_row(task, prompt, task.extent)
                self._advance(task, prompt.last_logits)
                metrics.FIRST_TOKEN_SECONDS.observe(time.monotonic() - task.arrived_s)

    def _decode(self) -> None:
        """Draw one token of every started row."""
        self._seating.make_room()
        # Rows of one adapter are neighbours.
        rows = sorted(self._seating.started_rows, key=lambda task: task.version or "")
        most = self._model.shape.decode_most
        for first in range(0, len(rows), most):
            self._decode_together(rows[first : first + most])

    def _decode_together(self, rows: Sequence[RowTask]) -> None:
        try:
            logits_RV = self._model.decode([_newest(task) for task in rows])
        except Exception as error:  # noqa: BLE001  whatever torch raises ends these rows only
            self._fail(rows, error)
            return
        for task, logits_V in zip(rows, logits_RV, strict=True):
            self._advance(task, logits_V)

    def _advance(self, task: RowTask, logits_V: torch.Tensor) -> None:
        try:
            result = task.advance(logits_V)
        except Exception as error:  # noqa: BLE001  one row's fault is not its neighbours'
            self._fail([task], error)
            return
        if result is not None:
            if task.row.routed_experts and task.extent is not None:
                found = self._model.routes.of(task.extent, task.position)
                result = replace(result, experts=found)
            self._seating.leave(task)
            task.resolve(result)

    def _fail(self, tasks: Iterable[AnyTask], error: Exception) -> None:
        """End the tasks that a fault concerns; what was raised on purpose reaches them as it is."""
        if not isinstance(error, TinsmithError):
            _log.error("sampling_failed", exc_info=error)
            error = ServerError(
                f"the sampler failed with {type(error).__name__}; its log has the details"
            )
        self._end(tasks, error)

    def _end(self, tasks: Iterable[AnyTask], error: Exception) -> None:
        for task in tasks:
            self._seating.leave(task)
            task.fail(error)


def _stretch(prompt: Prompt, task: AnyTask) -> Piece:
    """The pass's piece for a prompt: the next tokens of it."""
    tokens = prompt.next_stretch()
    wanted = np.arange(max(tokens.start, prompt.needs_from), tokens.stop) - tokens.start
    return Piece(prompt.tokens[tokens], tokens.start, prompt.extent, task.adapter, wanted)


def _newest(task: RowTask) -> Piece:
    """The pass's piece for a row: its newest token."""
    if task.extent is None:
        raise RuntimeError("a row without room in the cache cannot decode")
    token = np.array(task.drawn[-1:], dtype=np.int32)
    return Piece(token, task.position, task.extent, task.adapter, np.zeros(1, dtype=np.int64))
