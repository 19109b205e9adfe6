"""What a trainer of several ranks is asked to do in tests; as a program, on some of them.

Rank 0 is a process of its own here too: it ends without a word when another rank is gone.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
from tests.unit.trainer.examples import cross_entropy, datum, random_datum
from torch.distributed.tensor import DTensor

from tinsmith.config import LogsConfig, ModelConfig
from tinsmith.errors import InvalidRequest, NotSupported, UnusableGradient
from tinsmith.messages.ops import (
    WHOLE,
    ForwardBackwardDone,
    LoraShape,
    OptimStep,
    OptimStepDone,
)
from tinsmith_trainer import losses
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.checkpointing import decoder_layers
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.crew import Crew
from tinsmith_trainer.loading import load
from tinsmith_trainer.parts import NEW, Past
from tinsmith_trainer.state import digest

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from tinsmith.messages.ops import Datum
    from tinsmith_trainer.engine import TrainingEngine

PATIENCE_S = 240
TOKENS = 64  # of a pass
BATCHES = ((40, 7, 23, 64, 33), (12,), (5, 60, 61), (50, -50), (3,), (9, 64, 2, 31, 30, 29, 64))
"""Lengths of the datums of each step: more and fewer passes than ranks, and one alone.

Those below zero have no weight: their passes have nothing to go back for."""
ADAM = OptimStep(learning_rate=1e-3, eps=1e-4, grad_clip_norm=20.0, weight_decay=0.1)
DIMUON = OptimStep(learning_rate=1e-3, eps=1e-4, optimizer="dimuon")


class Task(msgspec.Struct):
    """One run."""

    folder: str
    name: str
    optimizer: str = "adamw"
    sharding: str = "none"
    dtype: str = "float32"
    checkpointing: bool = False
    ranks: int = 2
    files: dict[str, bytes] = {}
    """What the run goes on from; empty for a new model."""
    with_optimizer: bool = True
    """Whether it takes the optimizer of ``files`` too."""
    pasts: list[ForwardBackwardDone] = []
    """What its passes came to before, if it is repeated."""
    steps: list[OptimStepDone] = []
    """Likewise of its steps."""


class Outcome(msgspec.Struct):
    """What it came to."""

    done: list[ForwardBackwardDone] = []
    steps: list[OptimStepDone] = []
    norms: list[float] = []
    states: list[str] = []
    refusals: list[str] = []
    unusable: list[str] = []
    """What steps said that had too large a gradient."""
    files: dict[str, bytes] = {}
    rescored: list[float] = []
    """Log-probabilities that the first rank alone has asked for; of adapters."""
    held_bytes: int = 0
    """Of the base, on the first rank."""
    state_bytes: int = 0
    """Of all that a step needs and changes, likewise."""
    gradients_left: int = 0
    """Of parameters, after an op."""
    not_supported: str = ""
    """Why there is no model with Dimuon, where there is none."""


def carry_out(engine: TrainingEngine, task: Task) -> Outcome:
    """The same on any engine."""
    out, is_whole = Outcome(), task.name.endswith(":full")
    if task.files:
        engine.restore(
            "m", dict(task.files), with_optimizer=task.with_optimizer, optimizer=task.optimizer
        )
    else:
        out.not_supported = _not_supported(engine) if is_whole else ""
        shape = WHOLE if is_whole else LoraShape(rank=4, seed=3)
        engine.create("m", shape, task.optimizer)
    out.states.append(digest(engine.state("m")))
    for index, lengths in enumerate(BATCHES):
        op = cross_entropy(*map(_datum, lengths))
        step = ADAM if task.optimizer == "adamw" else DIMUON
        rate = step.learning_rate / (index + 1)
        step = msgspec.structs.replace(step, learning_rate=rate)
        past = Past.of(task.pasts[index]) if task.pasts else NEW
        out.refusals.append(_refused(engine))
        _abandon(engine)
        if task.sharding != "none" and not task.pasts:
            out.refusals += _failed(engine)
        if not task.pasts:
            out.unusable.append(_unusable(engine, step))
        out.done.append(engine.forward_backward("m", op, past))
        out.state_bytes = _state_bytes(engine)
        out.gradients_left += sum(one.grad is not None for one in _base(engine).parameters())
        past = Past.of(task.steps[index]) if task.steps else NEW
        stepped = engine.optim_step("m", step, past)
        out.steps.append(stepped)
        out.norms.append(stepped.metrics["grad_norm"])
        out.states.append(digest(engine.state("m")))
    probe = cross_entropy(random_datum(30, seed=1), forward_only=True)
    out.done.append(engine.forward_backward("m", probe))
    out.files = dict(to_files(engine.snapshot("m"), with_optimizer=True))
    if not is_whole:
        (example,) = engine._examples(probe, *losses.chosen(probe.loss_fn, probe.loss_config))
        out.rescored = engine.rescore(engine.tenant("m"), example).tolist()
    engine.drop("m")
    out.held_bytes = sum(map(_held_bytes, _base(engine).parameters()))
    return out


def _datum(length: int) -> Datum:
    if length < 0:
        return datum(range(-length), weights=[0.0] * -length)
    return random_datum(length, seed=length)


def _refused(engine: TrainingEngine) -> str:
    """An op that fails in its last passes, when all others were made."""
    good, bad = random_datum(64, seed=2), datum(range(5), weights=[3e38] * 5)
    try:
        engine.forward_backward("m", cross_entropy(good, good, bad))
    except InvalidRequest as error:
        return str(error)
    return ""


def _unusable(engine: TrainingEngine, step: OptimStep) -> str:
    """A step that fails, as its gradient is too large."""
    poison = datum([1, 2], weights=[1e20, 1e20])
    engine.forward_backward("m", cross_entropy(random_datum(9), poison))
    try:
        engine.optim_step("m", step)
    except UnusableGradient as error:
        return str(error).partition(":")[0]
    return ""


def _not_supported(engine: TrainingEngine) -> str:
    try:
        engine.create("other", WHOLE, "dimuon")
    except NotSupported as error:
        return str(error)
    engine.drop("other")
    return ""


def _state_bytes(engine: TrainingEngine) -> int:
    tenant = engine.tenant("m")
    moments = tenant.optimizer.exp_avg, tenant.optimizer.exp_avg_sq
    return sum(one.nbytes for one in (tenant.weights, tenant.gradient, *moments))


def _abandon(engine: TrainingEngine) -> None:
    """Of seven passes, nobody waits for any after the first on each rank."""
    passes = engine.passes("m", cross_entropy(*[random_datum(64, seed=2)] * 7))
    next(passes)
    next(passes)
    passes.close()


def _failed(engine: TrainingEngine) -> Iterator[str]:
    """Ops that fail on the first rank alone, in the middle of a layer's way down and up."""
    op = cross_entropy(*(random_datum(n, seed=n) for n in (64, 64, 5)))

    def fail(*_: object) -> None:
        raise RuntimeError("on one rank")

    def fail_on_the_way_back(_: object, __: object, output: Tensor) -> None:
        output.register_hook(fail)

    layer = decoder_layers(_base(engine))[1]
    for handle in (
        layer.register_forward_pre_hook(fail),
        layer.register_forward_hook(fail_on_the_way_back),
    ):
        try:
            engine.forward_backward("m", op)
        except RuntimeError as error:
            yield str(error)
        handle.remove()


def _base(engine: TrainingEngine) -> PreTrainedModel:
    return engine._passes._base.model


def _held_bytes(parameter: Tensor) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).nbytes


def on_ranks(tasks: Sequence[Task], where: Path) -> list[Outcome]:
    """``tasks``, which are of one model, by this file as a program; each with a repetition."""
    given, found = where / "tasks", where / "outcomes"
    given.write_bytes(msgspec.msgpack.encode(tasks))
    command = [sys.executable, "-m", "tests.unit.trainer.ranked", str(given), str(found)]
    subprocess.run(command, check=True, timeout=PATIENCE_S)
    return msgspec.msgpack.decode(found.read_bytes(), type=list[Outcome])


def on_one_rank(tasks: Sequence[Task]) -> list[Outcome]:
    """``tasks`` in this process."""
    engine, environment = load(_model(tasks[0]), _settings(tasks[0], 1))
    assert environment["ranks"] == "1"
    return [carry_out(engine, task) for task in tasks]


def repeated(task: Task, outcome: Outcome) -> Task:
    """It again, as it was computed."""
    return msgspec.structs.replace(task, pasts=outcome.done, steps=outcome.steps)


def _model(task: Task) -> ModelConfig:
    return ModelConfig(name=task.name, path=task.folder, dtype=task.dtype)


def _settings(task: Task, ranks: int) -> TrainerConfig:
    return TrainerConfig(
        device="cpu",
        threads=1,
        microbatch_tokens=TOKENS,
        ranks=ranks,
        sharding=task.sharding if ranks > 1 else "none",
        checkpointing=task.checkpointing,
    )


def main(given: str, found: str) -> None:
    """Carry out the tasks in the file ``given`` on as many ranks as they say."""
    tasks = msgspec.msgpack.decode(Path(given).read_bytes(), type=list[Task])
    ranks, outcomes = tasks[0].ranks, []
    model, settings = _model(tasks[0]), _settings(tasks[0], ranks)
    with Crew(model, settings, LogsConfig()) as crew:
        engine, environment = load(model, settings, crew.seat)
        assert environment["ranks"] == str(ranks)
        for task in tasks:
            outcomes.append(carry_out(engine, task))
            outcomes.append(carry_out(engine, repeated(task, outcomes[-1])))
        crew.dismiss(engine)
    Path(found).write_bytes(msgspec.msgpack.encode(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
