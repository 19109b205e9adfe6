"""The training engine: every operation on every model, carried out synchronously.

Used from one thread. What an operation computes is a function of its model's state and of the
operation alone; one that raises has changed nothing, but for a step whose gradient is unusable:
it drops that gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tinsmith.errors import InvalidRequest, UnusableGradient
from tinsmith.messages.base import Tensor
from tinsmith.messages.ops import (
    CreateModel,
    CreateModelDone,
    ForwardBackward,
    ForwardBackwardDone,
    OptimStep,
    OptimStepDone,
)
from tinsmith_trainer import checkpoint_files, custom_loss, datums, losses, mismatch, optim, packing
from tinsmith_trainer.adapters import Adapter, Adapters, Snapshot
from tinsmith_trainer.checkpointing import checkpoint_layers
from tinsmith_trainer.lora import check_shape
from tinsmith_trainer.passes import Passes
from tinsmith_trainer.room import Room
from tinsmith_trainer.state import StateView

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping

    from tinsmith.messages.ops import LoraShape, OpResult
    from tinsmith_trainer.base_model import BaseModel, BaseModelInfo
    from tinsmith_trainer.datums import Example
    from tinsmith_trainer.loss import Loss
    from tinsmith_trainer.microbatch import Scored

__all__ = ["EngineOp", "Snapshot", "TrainingEngine"]

EngineOp = CreateModel | ForwardBackward | OptimStep
"""What an engine decides alone, from its models and the op."""


class TrainingEngine:
    """Many adapters on one base model."""

    def __init__(
        self, base: BaseModel, *, microbatch_tokens: int = 4096, checkpointing: bool = False
    ) -> None:
        """``microbatch_tokens`` bounds the padded tokens, and so the memory, of one pass.

        With ``checkpointing`` layers keep only their inputs for the backward pass, and compute the
        rest once more: the same bits with less memory, in more time.
        """
        self.info: BaseModelInfo = base.info
        self._device = base.device
        self.microbatch_tokens = microbatch_tokens
        self._limits = datums.Limits(base.info.vocab_size, base.info.context_length)
        self._passes = Passes(base)
        self._room = Room(base, self._passes.kept_bytes, checkpointing=checkpointing)
        if checkpointing:
            checkpoint_layers(base.model)
        self._adapters = Adapters()

    def models(self) -> tuple[str, ...]:
        """The ids of the models that exist here."""
        return tuple(self._adapters)

    def apply(self, model_id: str, op: EngineOp) -> OpResult:
        """Carry out one op; ``CreateModel`` makes a fresh adapter, whatever its checkpoint."""
        match op:
            case CreateModel(lora=lora):
                return self.create(model_id, lora)
            case ForwardBackward():
                return self.forward_backward(model_id, op)
            case OptimStep():
                return self.optim_step(model_id, op)

    def create(self, model_id: str, lora: LoraShape) -> CreateModelDone:
        """Make a fresh adapter; equal shapes and seeds give equal weights on any machine."""
        check_shape(lora)
        adapter = Adapter.fresh(lora, self._passes.targets.of(lora), self._device)
        self._adapters.add(model_id, adapter)
        return CreateModelDone(model_id=model_id, lora=lora)

    def restore(
        self, model_id: str, files: Mapping[str, bytes], *, with_optimizer: bool
    ) -> CreateModelDone:
        """Make the model what a checkpoint says, or put that in the place of what it is.

        A new model takes the checkpoint's shape; an existing one must have it already. Pending
        gradients are dropped. Without ``with_optimizer`` the optimizer starts afresh.
        """
        snapshot = checkpoint_files.from_files(
            files,
            base_model=self.info.name,
            targets=self._passes.targets,
            with_optimizer=with_optimizer,
        )
        if model_id in self._adapters:
            _check_same_shape(self._adapters.get(model_id).lora, snapshot.lora)
        self._adapters.put(model_id, Adapter.restored(snapshot, self._device))
        return CreateModelDone(model_id=model_id, lora=snapshot.lora)

    def forward_backward(self, model_id: str, op: ForwardBackward) -> ForwardBackwardDone:
        """``passes`` from the first to the last."""
        passes = self.passes(model_id, op)
        while True:
            try:
                next(passes)
            except StopIteration as end:
                done: ForwardBackwardDone = end.value
                return done

    def passes(
        self, model_id: str, op: ForwardBackward
    ) -> Generator[int, None, ForwardBackwardDone]:
        """Score the datums and, unless ``forward_only``, add up their gradient.

        Yields the tokens of each pass before it is made; other models may be used meanwhile.

        Raises:
            InvalidRequest: naming the datum, the key, the value and the limit, before anything
                is computed; or for a loss that is not finite. The accumulated gradient is then
                as it was.
            NoRoom: a datum alone takes more memory than there is.
        """
        adapter = self._adapters.get(model_id)
        loss, settings = losses.chosen(op.loss_fn, op.loss_config)
        examples = datums.parse(op.data, loss, settings, self._limits)
        self._check_room(examples, with_gradient=not op.forward_only)
        if op.forward_only:
            return (yield from self._run(adapter, examples, loss, settings, with_gradient=False))
        with adapter.collecting():
            return (yield from self._run(adapter, examples, loss, settings, with_gradient=True))

    def optim_step(self, model_id: str, op: OptimStep) -> OptimStepDone:
        """One AdamW step on the accumulated gradient, which is gone afterwards.

        Without a gradient nothing changes, as in torch.

        Raises:
            InvalidRequest: a hyperparameter is out of range; the gradient stays.
            UnusableGradient: it is not finite, or too large; weights and moments stay, and the
                gradient is gone, so that training can go on from here.
        """
        adapter = self._adapters.get(model_id)
        optim.check(op)
        norm = 0.0
        if adapter.gradient is not None:
            try:
                norm = optim.step(adapter.weights, adapter.gradient, adapter.optimizer, op)
            except UnusableGradient:
                adapter.gradient = None
                raise
            adapter.gradient = None
        return OptimStepDone(
            metrics={"grad_norm": norm, "optimizer_steps": float(adapter.optimizer.steps)}
        )

    def snapshot(self, model_id: str) -> Snapshot:
        """A copy of the model's weights and optimizer state; training may go on beside it."""
        return self._adapters.get(model_id).snapshot(self.info.name)

    def state(self, model_id: str) -> StateView:
        """The model's weights and optimizer state themselves, to be digested beside a pass."""
        adapter = self._adapters.get(model_id)
        return StateView(adapter.lora, adapter.weights, adapter.optimizer)

    def has_gradient(self, model_id: str) -> bool:
        """Whether a step would find anything to do."""
        return model_id in self._adapters and self._adapters.get(model_id).gradient is not None

    def _check_room(self, examples: list[Example], *, with_gradient: bool) -> None:
        """Raises NoRoom for a datum whose pass, which cannot be split, is larger than memory."""
        for index, example in enumerate(examples):
            if len(example) > self.microbatch_tokens:  # there is room for those, or no start
                self._room.check(f"data[{index}]", len(example), with_gradient=with_gradient)

    def drop(self, model_id: str) -> None:
        """Forget the model; nothing happens when there is none."""
        self._adapters.drop(model_id)

    def _run(
        self,
        adapter: Adapter,
        examples: list[Example],
        loss: Loss,
        settings: Mapping[str, float],
        *,
        with_gradient: bool,
    ) -> Generator[int, None, ForwardBackwardDone]:
        """All passes of an op, and its results in the order of its datums."""
        results: dict[int, Scored] = {}
        lengths = [len(example) for example in examples]
        plan = packing.plan(lengths, self.microbatch_tokens)
        for batch in plan:
            rows = [examples[index] for index in batch]
            yield sum(map(len, rows))
            scored = self._passes.run(adapter, rows, loss, settings, with_gradient=with_gradient)
            results.update(zip(batch, scored, strict=True))
        ordered = [_finite(results[index], index) for index in range(len(examples))]
        figures = mismatch.figures(loss, examples, ordered)
        figures |= custom_loss.figures(loss, examples, ordered)
        return _done(ordered, plan, figures)


def _finite(scored: Scored, index: int) -> Scored:
    if not (np.isfinite(scored.logprobs).all() and np.isfinite(scored.values).all()):
        raise InvalidRequest(
            f"data[{index}]: its loss is not a finite number, so the model has diverged or the "
            "weights are too large; go back to a checkpoint and lower the learning rate"
        )
    return scored


def _done(
    results: list[Scored], plan: tuple[packing.MicroBatch, ...], figures: Mapping[str, float]
) -> ForwardBackwardDone:
    """Metric keys must hold exactly one colon: ``name:reduction over chunks``."""
    loss = sum(float(scored.values.sum(dtype=np.float64)) for scored in results)
    tokens = sum(len(scored.logprobs) for scored in results)
    return ForwardBackwardDone(
        logprobs=tuple(_wire(scored.logprobs) for scored in results),
        metrics={"loss:sum": loss + 0.0, "tokens:sum": float(tokens), **figures},
        passes=plan,
    )


def _wire(array: np.ndarray[tuple[int, ...], np.dtype[np.float32]]) -> Tensor:
    return Tensor("float32", array.shape, array.astype("<f4", copy=False).tobytes())


def _check_same_shape(mine: LoraShape, other: LoraShape) -> None:
    for field in ("rank", "alpha", "train_attn", "train_mlp", "train_unembed"):
        if getattr(mine, field) != getattr(other, field):
            raise InvalidRequest(
                f"{field}: the checkpoint has {getattr(other, field)}, this model has "
                f"{getattr(mine, field)}; create a model from the checkpoint instead"
            )
