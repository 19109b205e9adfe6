"""What the first rank of a trainer tells the others to do; never stored, never on the bus."""

from __future__ import annotations

import msgspec

from tinsmith.messages.ops import ForwardBackward, LoraShape, OptimizerFamily, OptimStep
from tinsmith_trainer.parts import Past


class Command(msgspec.Struct, frozen=True, tag=True):
    """What the first rank is about to do."""


class Create(Command, frozen=True):
    """``TrainingEngine.create``."""

    model_id: str
    lora: LoraShape
    optimizer: OptimizerFamily


class Restore(Command, frozen=True):
    """``TrainingEngine.restore``; the files are told after it."""

    model_id: str
    files: tuple[str, ...]
    with_optimizer: bool
    optimizer: OptimizerFamily


class Begin(Command, frozen=True):
    """``TrainingEngine.passes``; in the place of those that the model has not ended, if any."""

    model_id: str
    op: ForwardBackward
    past: Past


class Advance(Command, frozen=True):
    """Up to the next passes of the model, or to their end."""

    model_id: str


class Join(Command, frozen=True):
    """A pass of the first rank alone, without a gradient: the others gather its weights."""


class Step(Command, frozen=True):
    """``TrainingEngine.optim_step``."""

    model_id: str
    op: OptimStep
    past: Past


class Drop(Command, frozen=True):
    """``TrainingEngine.drop``."""

    model_id: str


class Stop(Command, frozen=True):
    """There is nothing more to do."""


AnyCommand = Create | Restore | Begin | Advance | Join | Step | Drop | Stop

encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(AnyCommand).decode
