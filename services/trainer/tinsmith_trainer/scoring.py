"""All passes of one op over the model: their plan, and what they come to together."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from tinsmith.errors import InvalidRequest
from tinsmith.messages.base import Tensor
from tinsmith.messages.ops import ForwardBackwardDone
from tinsmith_trainer import custom_loss, mismatch, packing
from tinsmith_trainer.parts import Part, check_frame

if TYPE_CHECKING:
    from collections.abc import Callable, Generator, Mapping, Sequence

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
    frames: Sequence[Frame | None] = ()
    """Of each pass, for a request that is repeated; empty for one that has no past."""

    def passes(
        self, token_budget: int, alone: Callable[[Part], Made]
    ) -> Generator[Part, Made | None, ForwardBackwardDone]:
        """Yields what each pass is made of, and takes what came of it.

        Where that is None the pass is made by ``alone``. Results are in the order of the datums.
        """
        results: dict[int, Scored] = {}
        plan = packing.plan([len(example) for example in self.examples], token_budget)
        frames: list[Frame | None] = []
        for part, batch in zip(self._parts(plan, token_budget), plan, strict=True):
            made = (yield part) or alone(part)
            results.update(zip(batch, made.scored, strict=True))
            frames.append(made.frame)
        ordered = [_finite(results[index], index) for index in range(len(self.examples))]
        figures = mismatch.figures(self.loss, self.examples, ordered)
        figures |= custom_loss.figures(self.loss, self.examples, ordered)
        return _done(ordered, plan, figures, tuple(frames) if any(frames) else ())

    def _parts(self, plan: Sequence[packing.MicroBatch], token_budget: int) -> list[Part]:
        known = tuple(self.frames) or (None,) * len(plan)
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
) -> ForwardBackwardDone:
    """Metric keys must hold exactly one colon: ``name:reduction over chunks``."""
    loss = sum(float(scored.values.sum(dtype=np.float64)) for scored in results)
    tokens = sum(len(scored.logprobs) for scored in results)
    return ForwardBackwardDone(
        logprobs=tuple(_wire(scored.logprobs) for scored in results),
        metrics={"loss:sum": loss + 0.0, "tokens:sum": float(tokens), **figures},
        passes=plan,
        frames=frames,
    )


def _wire(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Tensor:
    return Tensor("float32", array.shape, array.astype("<f4", copy=False).tobytes())
