"""What the ranks of a trainer do that are not the first: as it does, until it stops."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith_trainer import commands
from tinsmith_trainer.commands import Advance, Begin, Create, Drop, Join, Restore, Step, Stop

if TYPE_CHECKING:
    from tinsmith_trainer.commands import AnyCommand
    from tinsmith_trainer.ranked_engine import Passes, RankedEngine


class Follower:
    """Obeys the first rank, on an engine of its own."""

    def __init__(self, engine: RankedEngine) -> None:
        self._engine = engine
        self._ranks = engine.ranks
        self._under_way: dict[str, Passes] = {}  # by model, as on the first rank

    def run(self) -> None:
        """Until the first rank stops; results are told there, and errors of all ranks too."""
        with self._engine.telling():
            self._follow()

    def _follow(self) -> None:
        while not isinstance(command := commands.decode(self._ranks.hear()), Stop):
            try:
                self._obey(command)
            except Exception as exc:  # noqa: BLE001 - sorted out by the next line
                self._ranks.check_shared(exc)

    def _obey(self, command: AnyCommand) -> None:
        match command:
            case Begin(model_id, op, past):
                self._abandon(model_id)
                self._under_way[model_id] = self._engine.own_passes(model_id, op, past)
            case Advance(model_id):
                passes = self._under_way.pop(model_id)
                if next(passes, None) is not None:
                    self._under_way[model_id] = passes
            case Join():
                self._engine.join(with_gradient=False)
            case Drop(model_id):
                self._abandon(model_id)
                self._engine.drop(model_id)
            case _:
                self._change(command)

    def _change(self, command: AnyCommand) -> None:
        match command:
            case Create(model_id, lora, optimizer):
                self._engine.create(model_id, lora, optimizer)
            case Restore(model_id, names, with_optimizer, optimizer):
                files = {name: self._ranks.hear() for name in names}
                self._engine.restore(
                    model_id, files, with_optimizer=with_optimizer, optimizer=optimizer
                )
            case Step(model_id, op, past):
                self._engine.optim_step(model_id, op, past)
            case _:
                msg = f"{type(command).__name__}: no command for a model"
                raise TypeError(msg)

    def _abandon(self, model_id: str) -> None:
        """The first rank has left them unfinished, as nobody waits for them any more."""
        if (passes := self._under_way.pop(model_id, None)) is not None:
            passes.close()
