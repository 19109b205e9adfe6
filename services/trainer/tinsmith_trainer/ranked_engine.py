"""The engine of a trainer with several ranks: what the first is asked for, all carry out."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, TypeVar

from tinsmith_trainer import commands
from tinsmith_trainer.commands import Advance, Begin, Create, Drop, Join, Restore, Step, Stop
from tinsmith_trainer.engine import TrainingEngine
from tinsmith_trainer.parts import NEW, Past
from tinsmith_trainer.training_files import STATE

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
    from contextlib import AbstractContextManager

    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from tinsmith.messages.ops import (
        CreateModelDone,
        ForwardBackward,
        ForwardBackwardDone,
        LoraShape,
        OptimizerFamily,
        OptimStep,
        OptimStepDone,
    )
    from tinsmith_trainer.base_model import BaseModel
    from tinsmith_trainer.commands import Command
    from tinsmith_trainer.datums import Example
    from tinsmith_trainer.parts import Made, Outcome, Part
    from tinsmith_trainer.ranks import Ranks
    from tinsmith_trainer.sharded_base import ShardedBase
    from tinsmith_trainer.sharded_state import ShardedForm
    from tinsmith_trainer.trainable import Trainable

    Passes = Generator[Part, Made | None, ForwardBackwardDone]

R = TypeVar("R")


class RankedEngine(TrainingEngine):
    """Every rank has one, with the same models in it; only that of the first is asked."""

    def __init__(
        self,
        base: BaseModel,
        ranks: Ranks,
        *,
        microbatch_tokens: int = 4096,
        checkpointing: bool = False,
        sharded: ShardedBase | None = None,
        form: ShardedForm | None = None,
    ) -> None:
        """``sharded`` is what gathers the weights of ``base``, if they are in shards.

        ``form`` is given where the state of what is trained is.
        """
        super().__init__(
            base,
            microbatch_tokens=microbatch_tokens,
            checkpointing=checkpointing,
            team=ranks,
            form=form,
        )
        self._telling = None if form is None else form.telling
        self._unread = nullcontext() if form is None else form.telling.unread
        self.ranks = ranks
        self.ranks.idle = lambda part: self.join(with_gradient=part.with_gradient)
        self._sharded = sharded

    def create(
        self, model_id: str, lora: LoraShape, optimizer: OptimizerFamily = "adamw"
    ) -> CreateModelDone:
        """As its base class, on all ranks."""
        return self._changed(
            Create(model_id, lora, optimizer),
            lambda: super(RankedEngine, self).create(model_id, lora, optimizer),
        )

    def restore(
        self,
        model_id: str,
        files: Mapping[str, bytes],
        *,
        with_optimizer: bool,
        optimizer: OptimizerFamily = "adamw",
    ) -> CreateModelDone:
        """As its base class, on all ranks."""
        # Where state is in slices, its tensors are dealt out by these.
        names = tuple(name for name in files if self._telling is None or name == STATE)
        return self._changed(
            Restore(model_id, names, with_optimizer, optimizer),
            lambda: super(RankedEngine, self).restore(
                model_id, files, with_optimizer=with_optimizer, optimizer=optimizer
            ),
            *map(files.__getitem__, names),
        )

    def passes(self, model_id: str, op: ForwardBackward, past: Past = NEW) -> Passes:
        """As its base class, on all ranks; what is sent is never used."""
        passes = super().passes(model_id, op, past)
        self._tell(Begin(model_id, op, past))
        while True:
            self._tell(Advance(model_id))
            try:
                part = next(passes)
            except StopIteration as end:
                done: ForwardBackwardDone = end.value
                return done
            yield part

    def can_join(self, parts: Sequence[Part]) -> bool:  # noqa: ARG002 - whatever they are
        """Never: a pass is one model's."""
        return False

    def together(self, parts: Sequence[Part]) -> list[Outcome | None]:
        """See ``can_join``."""
        return [None for _ in parts]

    def rescore(self, tenant: Trainable, example: Example) -> NDArray[np.float32]:
        """As its base class; the first rank asks for it alone."""
        if self._sharded is not None:
            self._tell(Join())
        return super().rescore(tenant, example)

    def join(self, *, with_gradient: bool) -> None:
        """Have a part in a pass that other ranks make: that of the weights which lie here."""
        with self._round(with_gradient=with_gradient):
            pass

    def optim_step(self, model_id: str, op: OptimStep, past: Past = NEW) -> OptimStepDone:
        """As its base class, on all ranks; they must come to the same weights."""
        return self._changed(
            Step(model_id, op, past),
            lambda: super(RankedEngine, self).optim_step(model_id, op, past),
        )

    def drop(self, model_id: str) -> None:
        """As its base class, on all ranks."""
        with self._unread:
            self._tell(Drop(model_id))
            super().drop(model_id)

    def own_passes(self, model_id: str, op: ForwardBackward, past: Past) -> Passes:
        """Of a rank that is not the first: as ``passes``, in step with those of the first."""
        return super().passes(model_id, op, past)

    def close(self) -> None:
        """The other ranks end."""
        self._tell(Stop())
        if self._telling is not None:
            self._telling.stop()

    def telling(self) -> AbstractContextManager[None]:
        """Of a rank that is not the first: tell it the slices of states beside what is in here."""
        return nullcontext() if self._telling is None else self._telling.answering()

    def _alone(self, part: Part) -> Made:
        with self._round(with_gradient=part.with_gradient):
            return super()._alone(part)

    def _round(self, *, with_gradient: bool) -> AbstractContextManager[None]:
        if self._sharded is None:
            return nullcontext()
        return self._sharded.round(with_gradient=with_gradient)

    def _tell(self, command: Command, *files: bytes) -> None:
        if self.ranks.is_first:
            for data in (commands.encode(command), *files):
                self.ranks.tell(data)

    def _changed(self, command: Create | Restore | Step, call: Callable[[], R], *files: bytes) -> R:
        """What ``call`` returns, on all ranks: the others hear ``command``, and then ``files``."""
        with self._unread:
            self._tell(command, *files)
            return self.ranks.changed(call, lambda: self._alike(command.model_id))

    def _alike(self, model_id: str) -> Iterable[Tensor]:
        return self._adapters.get(model_id).alike() if model_id in self._adapters else ()
