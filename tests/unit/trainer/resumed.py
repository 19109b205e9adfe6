"""Runs that go on from a checkpoint, in each way there is; as a program, on two ranks.

Rank 0 is a process of its own there, as in ``ranked``.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from tests.unit.trainer.examples import cross_entropy, random_datum
from tests.unit.trainer.ranked import PATIENCE_S

from tinsmith.config import LogsConfig, ModelConfig
from tinsmith.messages.ops import WHOLE, ForwardBackwardDone, LoraShape, OptimStep
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.crew import Crew
from tinsmith_trainer.loading import load
from tinsmith_trainer.parts import NEW, Past
from tinsmith_trainer.state import digest

if TYPE_CHECKING:
    from collections.abc import Sequence

    from tinsmith_trainer.engine import TrainingEngine

BEFORE, AFTER = 6, 3  # steps
LENGTHS = (40, 7, 23, 64, 33)  # several passes on each of two ranks
STEPS = {
    "adamw": OptimStep(learning_rate=1e-3, weight_decay=0.1, grad_clip_norm=20.0),
    "dimuon": OptimStep(learning_rate=1e-3, optimizer="dimuon"),
}


class Plan(msgspec.Struct, frozen=True):
    """A run."""

    folder: str
    name: str  # the base's; one that is trained whole ends on :full
    rank: int = 0
    optimizer: str = "adamw"

    @property
    def shape(self) -> LoraShape:
        return LoraShape(rank=self.rank, alpha=8.0, seed=11) if self.rank else WHOLE


class Leg(msgspec.Struct):
    """What some steps came to."""

    done: list[ForwardBackwardDone] = []
    states: list[str] = []
    """After each step."""


class Found(msgspec.Struct):
    """All ways on from the state after ``BEFORE`` steps."""

    saved: str  # its digest
    files: dict[str, bytes]  # it as a checkpoint
    live: Leg
    resumed: Leg  # with the optimizer
    weights_only: Leg


def steps(engine: TrainingEngine, plan: Plan, first: int, pasts: Sequence[Past]) -> Leg:
    """As many steps as there are ``pasts``, on data that depends on a step's number alone."""
    leg = Leg()
    for number, past in enumerate(pasts, start=first):
        data = (random_datum(n, seed=100 * number + n) for n in LENGTHS)
        leg.done.append(engine.forward_backward("m", cross_entropy(*data), past))
        engine.optim_step("m", STEPS[plan.optimizer])
        leg.states.append(digest(engine.state("m")))
    return leg


def ways(engine: TrainingEngine, plan: Plan) -> Found:
    """Train, save, and go on live, with the optimizer and without it."""
    engine.create("m", plan.shape, plan.optimizer)
    steps(engine, plan, 0, [NEW] * BEFORE)
    saved = digest(engine.state("m"))
    files = dict(to_files(engine.snapshot("m"), with_optimizer=True))
    live = steps(engine, plan, BEFORE, [NEW] * AFTER)
    engine.drop("m")
    legs = (resumed(engine, plan, files, with_optimizer=way) for way in (True, False))
    return Found(saved, files, live, *legs)


def resumed(
    engine: TrainingEngine,
    plan: Plan,
    files: dict[str, bytes],
    pasts: Sequence[Past] = (NEW,) * AFTER,
    *,
    with_optimizer: bool,
) -> Leg:
    """The steps after the checkpoint in ``files``."""
    engine.restore("m", files, with_optimizer=with_optimizer, optimizer=plan.optimizer)
    leg = steps(engine, plan, BEFORE, pasts)
    engine.drop("m")
    return leg


def on_one_rank(folder: str, name: str) -> TrainingEngine:
    """An engine in this process."""
    return load(ModelConfig(name=name, path=folder), _settings(1))[0]


def on_two_ranks(plans: Sequence[Plan], where: Path, files: Sequence[dict[str, bytes]]) -> Report:
    """``ways`` of ``plans``, which are of one model, and each going on from its ``files``."""
    given, found = where / "plans", where / "found"
    given.write_bytes(msgspec.msgpack.encode((plans, files)))
    command = [sys.executable, "-m", "tests.unit.trainer.resumed", str(given), str(found)]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    return msgspec.msgpack.decode(found.read_bytes(), type=Report)


class Report(msgspec.Struct):
    """Of two ranks, by plan."""

    ways: list[Found]
    from_one: list[Leg]
    """On from checkpoints that one rank has made, with their optimizer."""


def _settings(ranks: int) -> TrainerConfig:
    return TrainerConfig(device="cpu", threads=1, microbatch_tokens=64, ranks=ranks)


def main(given: str, found: str) -> None:
    """Do what ``on_two_ranks`` asks for."""
    kinds = tuple[list[Plan], list[dict[str, bytes]]]
    plans, files = msgspec.msgpack.decode(Path(given).read_bytes(), type=kinds)
    model, settings = ModelConfig(name=plans[0].name, path=plans[0].folder), _settings(2)
    with Crew(model, settings, LogsConfig()) as crew:
        engine, _ = load(model, settings, crew.seat)
        report = Report([ways(engine, plan) for plan in plans], [])
        for plan, one in zip(plans, files, strict=True):
            report.from_one.append(resumed(engine, plan, one, with_optimizer=True))
        crew.dismiss(engine)
    Path(found).write_bytes(msgspec.msgpack.encode(report))


if __name__ == "__main__":
    main(*sys.argv[1:])
