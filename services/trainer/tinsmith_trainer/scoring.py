"""All passes of one op over the model: their plan, and what they come to together."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from msgspec import structs

from tinsmith.errors import InvalidRequest
from tinsmith.messages.base import Tensor
from tinsmith.messages.ops import ForwardBackwardDone
from tinsmith_trainer import custom_loss, mismatch, packing
from tinsmith_trainer.parts import NEW, Part, Past, check_frame
from tinsmith_trainer.shares import MOST_RANKS, Alone, Sums, Team, rounds

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

    from torch import Tensor as Floats

    from tinsmith.messages.ops import Frame
    from tinsmith_trainer.datums import Example
    from tinsmith_trainer.loss import Loss
    from tinsmith_trainer.microbatch import Scored
    from tinsmith_trainer.parts import Made
    from tinsmith_trainer.trainable import Trainable


@dataclass(frozen=True)
class Scoring:
    """A request to score datums, read and checked."""

    tenant: Trainable
    examples: list[Example]
    loss: Loss
    settings: Mapping[str, float]
    with_gradient: bool
    past: Past = NEW
    team: Team = field(default_factory=Alone)
    by_pass: bool = False
    """Whether each pass is a sum of its own."""

    def passes(
        self, token_budget: int, alone: Callable[[Part], Made], gradient: Floats | None
    ) -> Generator[Part, Made | None, ForwardBackwardDone]:
        """Yields what each pass is made of, and takes what came of it.

        Where that is None the pass is made by ``alone``, which adds to ``gradient`` if there is
        one. With several ranks it is the first of those that they make at once that is yielded.
        Results are in the order of the datums.
        """
        results: dict[int, Scored] = {}
        shares = self._shares()
        lengths = [len(example) for example in self.examples]
        plan = packing.plan(lengths, packing.budget(lengths, token_budget, shares))
        frames: dict[int, Frame | None] = {}
        parts = self._parts(plan, token_budget)
        adder = self.tenant.adder if self.by_pass else None
        count = shares
        if self.by_pass:
            count = len(plan) if adder is None else self.team.size
        at_once = adder is not None or (not self.by_pass and shares == self.team.size)
        sums = Sums(gradient, adder or self.team, at_once=at_once)
        for share in rounds(len(plan), count, at_once=at_once, is_apart=adder is not None):
            for indices in share:
                chosen = [parts[index] for index in indices]
                sent = yield chosen[0]
                made = [sent] if sent else self._made(chosen, alone, at_once=at_once)
                for index, one in zip(indices, made, strict=True):
                    results.update(zip(plan[index], one.scored, strict=True))
                    frames[index] = one.frame
            sums.end_share()
        sums.end()
        ordered = [_finite(results[index], index) for index in range(len(self.examples))]
        figures = mismatch.figures(self.loss, self.examples, ordered)
        figures |= custom_loss.figures(self.loss, self.examples, ordered)
        in_order = tuple(frames[index] for index in range(len(plan)))
        done = _done(ordered, plan, figures, in_order if any(in_order) else (), shares)
        return structs.replace(done, by_pass=self.by_pass)

    def _shares(self) -> int:
        shares = self.team.size if self.past.ranks is None else self.past.ranks
        if not 1 <= shares <= MOST_RANKS:
            raise InvalidRequest(
                f"ranks: {shares} is not from 1 to {MOST_RANKS}; the log is damaged, or from a "
                "trainer with more"
            )
        return shares

    def _made(
        self, parts: Sequence[Part], alone: Callable[[Part], Made], *, at_once: bool
    ) -> list[Made]:
        if at_once:
            return self.team.made(parts, alone)
        return [self.team.agreed(lambda: alone(part)) for part in parts]  # noqa: B023 - called here

    def _parts(self, plan: Sequence[packing.MicroBatch], token_budget: int) -> list[Part]:
        known = self.past.frames or (None,) * len(plan)
        if len(known) != len(plan):
            raise InvalidRequest(
                f"frames: {len(known)}, for {len(plan)} passes of this request; the log is "
                "damaged, or from a trainer with passes of another size"
            )
        return [
            self._part(batch, frame, token_budget) for batch, frame in zip(plan, known, strict=True)
        ]

    def _part(self, batch: packing.MicroBatch, frame: Frame | None, token_budget: int) -> Part:
        rows = [self.examples[index] for index in batch]
        part = Part(self.tenant, rows, self.loss, self.settings, self.with_gradient, frame)
        if frame is not None:
            check_frame(frame, part, token_budget)
        return part


def _finite(scored: Scored, index: int) -> Scored:
    if not (np.isfinite(scored.logprobs).all() and np.isfinite(scored.values).all()):
        raise InvalidRequest(
            f"data[{index}]: its loss is not a finite number, so the model has diverged or the "
            "weights are too large; go back to a checkpoint and lower the learning rate"
        )
    return scored


def _done(
    results: list[Scored],
    plan: tuple[packing.MicroBatch, ...],
    figures: Mapping[str, float],
    frames: tuple[Frame | None, ...],
    ranks: int,
) -> ForwardBackwardDone:
    """Metric keys must hold exactly one colon: ``name:reduction over chunks``."""
    loss = sum(float(scored.values.sum(dtype=np.float64)) for scored in results)
    tokens = sum(len(scored.logprobs) for scored in results)
    return ForwardBackwardDone(
        logprobs=tuple(_wire(scored.logprobs) for scored in results),
        metrics={"loss:sum": loss + 0.0, "tokens:sum": float(tokens), **figures},
        passes=plan,
        frames=frames,
        ranks=ranks,
    )


def _wire(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Tensor:
    return Tensor("float32", array.shape, array.astype("<f4", copy=False).tobytes())
