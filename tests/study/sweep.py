"""Runs of one length at several learning rates, with adapters of several ranks or all weights.

Nothing is between the study and the trainer's engine: the ops are those that a server's trainer
carries out, on one base model for all adapters.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, NamedTuple

from tests.unit.trainer.examples import cross_entropy, values

from tinsmith.errors import UserError
from tinsmith.messages.ops import WHOLE, LoraShape, OptimStep
from tinsmith_trainer import base_model
from tinsmith_trainer.engine import TrainingEngine

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from tests.study.lessons import Lessons

    from tinsmith.messages.ops import Datum


class Plan(NamedTuple):
    """What all runs of a study have in common."""

    folder: Path
    lessons: Lessons
    steps: int
    rows: int  # datums of a step
    seed: int = 0

    def shape(self, rank: int) -> LoraShape:
        """Of the models with ``rank``; 0 for all weights."""
        return LoraShape(rank=rank, seed=self.seed) if rank else WHOLE


class Run(NamedTuple):
    """What became of one; losses are per token of an answer."""

    rank: int  # 0: all weights
    rate: float
    held_out: float  # after the last step; not finite for a run that diverged
    losses: tuple[float, ...]  # of each step's batch, before the step
    seconds: float


class Best(NamedTuple):
    """Where the held-out loss of one rank is lowest."""

    rank: int
    rate: float  # of the runs
    held_out: float  # there
    fitted: float  # rate at the lowest point of a parabola through the best run and those beside
    is_inside: bool  # whether there were runs beside it; else the best rate may be further out


def runs(plan: Plan, rank: int, rates: Sequence[float], engine: TrainingEngine) -> Iterator[Run]:
    """One run for each rate, each from the untrained model."""
    for rate in rates:
        began, losses, held_out = time.perf_counter(), [], math.nan
        engine.create("m", plan.shape(rank))
        try:
            for batch in plan.lessons.batches(plan.steps, plan.rows, plan.seed):
                losses.append(_loss(engine, batch, learns=True))
                engine.optim_step("m", OptimStep(learning_rate=rate))
            held_out = _loss(engine, plan.lessons.held_out, learns=False)
        except UserError:  # a loss or gradient that is no number any more
            held_out = math.inf
        finally:
            engine.drop("m")
        yield Run(rank, rate, held_out, tuple(losses), time.perf_counter() - began)


def engine_for(plan: Plan, rank: int) -> TrainingEngine:
    """For adapters, or for all weights."""
    base = base_model.load(str(plan.folder), name="study" if rank else "study:full")
    return TrainingEngine(base, microbatch_tokens=1024)


def untrained(plan: Plan, rank: int, engine: TrainingEngine) -> float:
    """The held-out loss of the model as it is."""
    engine.create("m", plan.shape(rank))
    try:
        return _loss(engine, plan.lessons.held_out, learns=False)
    finally:
        engine.drop("m")


def best(found: Sequence[Run]) -> Best:
    """Of the runs of one rank, in the order of their rates; one at least is finite."""
    losses = [run.held_out if math.isfinite(run.held_out) else math.inf for run in found]
    at = losses.index(min(losses))
    beside = losses[max(at - 1, 0) : at + 2]
    is_inside = 0 < at < len(found) - 1
    fitted = found[at].rate
    if is_inside and all(map(math.isfinite, beside)):
        rates = [math.log10(run.rate) for run in found[at - 1 : at + 2]]
        fitted = 10 ** _vertex(rates, beside)
    return Best(found[at].rank, found[at].rate, losses[at], fitted, is_inside)


def _vertex(x: Sequence[float], y: Sequence[float]) -> float:
    """Where the parabola through three points, the middle one lowest, has its lowest point."""
    left, right = (x[1] - x[0]) * (y[1] - y[2]), (x[1] - x[2]) * (y[1] - y[0])
    if left == right:
        return x[1]
    return x[1] - ((x[1] - x[0]) * left - (x[1] - x[2]) * right) / (2 * (left - right))


def _loss(engine: TrainingEngine, data: Sequence[Datum], *, learns: bool) -> float:
    done = engine.forward_backward("m", cross_entropy(*data, forward_only=not learns))
    tokens = sum(float(values(one.inputs["weights"]).sum()) for one in data)
    return done.metrics["loss:sum"] / tokens
