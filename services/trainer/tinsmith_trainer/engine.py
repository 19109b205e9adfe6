"""The training engine: every operation on every model, carried out synchronously.

Used from one thread. What an operation computes is a function of its model's state and of the
operation alone; one that raises has changed nothing, but for a step whose gradient is unusable:
it drops that gradient.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING

from tinsmith.errors import InvalidRequest, UnusableGradient
from tinsmith.messages.ops import (
    CreateModel,
    CreateModelDone,
    ForwardBackward,
    ForwardBackwardDone,
    OptimStep,
    OptimStepDone,
)
from tinsmith_trainer import datums, losses, optim
from tinsmith_trainer.checkpointing import checkpoint_layers
from tinsmith_trainer.forms import form_of
from tinsmith_trainer.parts import NEW, Part, is_joint
from tinsmith_trainer.room import Room
from tinsmith_trainer.scoring import Scoring
from tinsmith_trainer.shares import Alone
from tinsmith_trainer.spare import Spare
from tinsmith_trainer.trainable import Snapshot, Tenants

if TYPE_CHECKING:
    from collections.abc import Generator, Mapping, Sequence

    import numpy as np
    from numpy.typing import NDArray

    from tinsmith.messages.ops import LoraShape, OpResult, OptimizerFamily
    from tinsmith_trainer.base_model import BaseModel, BaseModelInfo
    from tinsmith_trainer.datums import Example
    from tinsmith_trainer.forms import Form
    from tinsmith_trainer.loss import Loss
    from tinsmith_trainer.parts import Made, Outcome, Past
    from tinsmith_trainer.shares import Team
    from tinsmith_trainer.state import StateView
    from tinsmith_trainer.trainable import Trainable

__all__ = ["EngineOp", "Snapshot", "TrainingEngine"]

EngineOp = CreateModel | ForwardBackward | OptimStep
"""What an engine decides alone, from its models and the op."""


class TrainingEngine:
    """The tenants of one base model: many adapters, or the one that trains all of it."""

    def __init__(
        self,
        base: BaseModel,
        *,
        microbatch_tokens: int = 4096,
        checkpointing: bool = False,
        team: Team | None = None,
        form: Form | None = None,
    ) -> None:
        """``microbatch_tokens`` bounds the padded tokens, and so the memory, of one pass.

        With ``checkpointing`` layers keep only their inputs for the backward pass, and compute the
        rest once more: the same bits with less memory, in more time. With a ``team`` all of its
        ranks must carry out the same operations in the same order. ``form`` is that of its
        tenants, if it is not the one that the base's name stands for.
        """
        self._team = team or Alone()
        self.info: BaseModelInfo = base.info
        self.microbatch_tokens = microbatch_tokens
        self._limits = datums.Limits(base.info.vocab_size, base.info.context_length)
        self._form = form or form_of(base)
        self._passes = self._form.passes
        self._room = Room(
            base,
            self._passes.kept_bytes,
            checkpointing=checkpointing,
            gradient_bytes=self._form.gradient_bytes,
        )
        if checkpointing:
            checkpoint_layers(base.model)
        self._adapters = Tenants()
        self.spare = Spare()
        """For copies that nobody reads any more, and the memory of the next ones."""

    def models(self) -> tuple[str, ...]:
        """The ids of the models that exist here."""
        return tuple(self._adapters)

    def apply(self, model_id: str, op: EngineOp, past: Past = NEW) -> OpResult:
        """Carry out one op; ``CreateModel`` makes a fresh tenant, whatever its checkpoint.

        ``past`` is that of an op that is repeated.
        """
        match op:
            case CreateModel():
                return self.create(model_id, op.lora, op.optimizer)
            case ForwardBackward():
                return self.forward_backward(model_id, op, past)
            case OptimStep():
                return self.optim_step(model_id, op, past)

    def create(
        self, model_id: str, lora: LoraShape, optimizer: OptimizerFamily = "adamw"
    ) -> CreateModelDone:
        """Make a fresh tenant; equal shapes and seeds give equal weights on any machine."""
        self._adapters.check_new(model_id)
        tenant = self._form.fresh(lora, optimizer)
        self._adapters.put(model_id, tenant)
        return CreateModelDone(model_id=model_id, lora=tenant.lora)

    def restore(
        self,
        model_id: str,
        files: Mapping[str, bytes],
        *,
        with_optimizer: bool,
        optimizer: OptimizerFamily = "adamw",
    ) -> CreateModelDone:
        """Make the model what a checkpoint says, or put that in the place of what it is.

        A new model takes the checkpoint's shape; an existing one must have it already. Pending
        gradients are dropped. Without ``with_optimizer`` the optimizer starts afresh: that which
        the model has, or for a new one ``optimizer``.
        """
        old = self._adapters.get(model_id) if model_id in self._adapters else None
        family = optimizer if old is None else old.optimizer.family
        snapshot = self._team.agreed(
            lambda: self._form.from_files(files, with_optimizer=with_optimizer, optimizer=family)
        )
        if old is not None:
            _check_same_kind(old, snapshot)
        self._adapters.put(model_id, self._form.restored(snapshot, replacing=old))
        return CreateModelDone(model_id=model_id, lora=snapshot.lora)

    def forward_backward(
        self, model_id: str, op: ForwardBackward, past: Past = NEW
    ) -> ForwardBackwardDone:
        """``passes`` from the first to the last."""
        passes = self.passes(model_id, op, past)
        while True:
            try:
                next(passes)
            except StopIteration as end:
                done: ForwardBackwardDone = end.value
                return done

    def passes(
        self, model_id: str, op: ForwardBackward, past: Past = NEW
    ) -> Generator[Part, Made | None, ForwardBackwardDone]:
        """Score the datums and, unless ``forward_only``, add up their gradient.

        Yields what each pass is to be made of; other models may be used meanwhile. Who has made
        it, with others by ``together``, sends what came of it. Else it is made here.

        Raises:
            InvalidRequest: naming the datum, the key, the value and the limit, before anything
                is computed; or for a loss that is not finite. The accumulated gradient is then
                as it was.
            NoRoom: a datum alone takes more memory than there is, or the gradient of a request
                that is repeated, and was made where it was whole.
        """
        tenant, with_gradient = self._adapters.get(model_id), not op.forward_only
        loss, settings = losses.chosen(op.loss_fn, op.loss_config)
        examples = self._team.agreed(lambda: self._examples(op, loss, settings))
        by_pass = past.by_pass if past.ranks is not None else tenant.adder is not None
        if with_gradient and tenant.adder is not None and not by_pass:
            size = tenant.layout.size * tenant.weights.element_size()
            self._team.agreed(lambda: self._room.check_whole(size))
        scoring = Scoring(
            tenant, examples, loss, settings, with_gradient, past, self._team, by_pass
        )
        with tenant.collecting(by_pass=by_pass) if with_gradient else nullcontext() as gradient:
            return (yield from scoring.passes(self.microbatch_tokens, self._alone, gradient))

    def can_join(self, parts: Sequence[Part]) -> bool:
        """Whether ``together`` may make one pass of these, which are of different models."""
        return is_joint(parts, self.microbatch_tokens)

    def together(self, parts: Sequence[Part]) -> list[Outcome | None]:
        """One pass for all of ``parts``; None where it must be made alone after all."""
        try:
            return [*self._passes.run(parts)]
        except Exception:  # noqa: BLE001 - nothing was added yet, and whose it is shows alone
            return [None for _ in parts]

    def _alone(self, part: Part) -> Made:
        outcome: Outcome = self._passes.run([part])[0]
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def tenant(self, model_id: str) -> Trainable | None:
        """The model, if it is here."""
        return self._adapters.get(model_id) if model_id in self._adapters else None

    def scratch(self, files: Mapping[str, bytes]) -> Trainable:
        """An adapter to score with that is no tenant's: that of ``files``, or none without any.

        May be called beside the torch thread.

        Raises:
            InvalidRequest: it is none of this base model.
        """
        return self._form.scratch(files)

    def rescore(self, tenant: Trainable, example: Example) -> NDArray[np.float32]:
        """Log-probabilities of the targets under ``tenant``, in one pass that changes nothing."""
        part = Part(tenant, [example], losses.find("cross_entropy"), {}, with_gradient=False)
        return self._alone(part).scored[0].logprobs

    def optim_step(self, model_id: str, op: OptimStep, past: Past = NEW) -> OptimStepDone:
        """One step on the accumulated gradient, which is gone afterwards.

        Without a gradient nothing changes, as in torch.

        Raises:
            InvalidRequest: a hyperparameter is out of range, or the step is of another optimizer
                than the model's; the gradient stays.
            UnusableGradient: it is not finite, or too large; weights and moments stay, and the
                gradient is gone, so that training can go on from here.
        """
        adapter = self._adapters.get(model_id)
        optim.check(op)
        optim.check_family(adapter.optimizer, op)
        block = adapter.norm_block if past.norm_block is None else past.norm_block
        optim.check_block(block)
        try:
            norm = adapter.step(op, block)
        except UnusableGradient:
            adapter.gradient = None
            raise
        adapter.gradient = None
        return OptimStepDone(
            metrics={"grad_norm": norm, "optimizer_steps": float(adapter.optimizer.steps)},
            norm_block=block,
        )

    def snapshot(self, model_id: str) -> Snapshot:
        """A copy of the model's weights and optimizer state; training may go on beside it."""
        tenant = self._adapters.get(model_id)
        return tenant.snapshot(self.info.name, self.spare.take(tenant))

    def state(self, model_id: str) -> StateView:
        """The model's weights and optimizer state themselves, to be digested beside a pass."""
        return self._adapters.get(model_id).view()

    def has_gradient(self, model_id: str) -> bool:
        """Whether a step would find anything to do."""
        return model_id in self._adapters and self._adapters.get(model_id).gradient is not None

    def _examples(
        self, op: ForwardBackward, loss: Loss, settings: Mapping[str, float]
    ) -> list[Example]:
        """Raises NoRoom for a datum whose pass, which cannot be split, is larger than memory."""
        examples = datums.parse(op.data, loss, settings, self._limits)
        for index, example in enumerate(examples):
            if len(example) > self.microbatch_tokens:  # there is room for those, or no start
                self._room.check(f"data[{index}]", len(example), with_gradient=not op.forward_only)
        return examples

    def drop(self, model_id: str) -> None:
        """Forget the model; nothing happens when there is none."""
        if (tenant := self._adapters.drop(model_id)) is not None:
            self._form.let_go(tenant)

    def close(self) -> None:
        """Nothing more will be asked of it."""


def _check_same_kind(old: Trainable, snapshot: Snapshot) -> None:
    saved, has = snapshot.optimizer.family, old.optimizer.family
    if saved != has:
        raise InvalidRequest(
            f"optimizer: the state in the checkpoint is of {saved!r}, this model was created with "
            f"{has!r}; load it without the optimizer, or create a model from the checkpoint"
        )
    _check_same_shape(old.lora, snapshot.lora)


def _check_same_shape(mine: LoraShape, other: LoraShape) -> None:
    for field in ("rank", "alpha", "train_attn", "train_mlp", "train_unembed"):
        if getattr(mine, field) != getattr(other, field):
            raise InvalidRequest(
                f"{field}: the checkpoint has {getattr(other, field)}, this model has "
                f"{getattr(mine, field)}; create a model from the checkpoint instead"
            )
