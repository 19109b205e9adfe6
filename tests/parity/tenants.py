"""The same run on our side: a model of the training engine, or of a server with the real client."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from tinsmith.messages.base import Tensor
from tinsmith.messages.ops import WHOLE, Datum, ForwardBackward, LoraShape, OptimStep
from tinsmith_trainer import base_model
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.engine import TrainingEngine

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from tests.parity.independent import Example

SEED = 11


class EngineTenant:
    """A model of an engine in this process."""

    def __init__(self, base: Path, *, rank: int, learning_rate: float) -> None:
        """Rank 0: all weights are trained."""
        name = "tiny" if rank else "tiny:full"
        self._engine = TrainingEngine(base_model.load(str(base), name=name))
        self._engine.create("m", LoraShape(rank=rank, seed=SEED) if rank else WHOLE)
        self._step = OptimStep(learning_rate=learning_rate)

    def export(self, folder: Path) -> Path:
        folder.mkdir()
        for name, data in to_files(self._engine.snapshot("m"), with_optimizer=False).items():
            (folder / name).write_bytes(data)
        return folder

    def cross_entropy(self, batch: Sequence[Example]) -> float:
        data = [_datum(e, weights=e.weights) for e in batch]
        return self._forward_backward(data, "cross_entropy")

    def importance_sampling(self, batch: Sequence[Example], sampled: Sequence[np.ndarray]) -> float:
        pairs = zip(batch, sampled, strict=True)
        data = [_datum(e, logprobs=q, advantages=e.advantages) for e, q in pairs]
        return self._forward_backward(data, "importance_sampling")

    def step(self) -> None:
        self._engine.optim_step("m", self._step)

    def logprobs(self, batch: Sequence[Example]) -> list[np.ndarray]:
        data = tuple(_datum(e) for e in batch)
        op = ForwardBackward(data=data, loss_fn="cross_entropy", forward_only=True)
        done = self._engine.forward_backward("m", op)
        return [np.frombuffer(one.data, "<f4") for one in done.logprobs]

    def _forward_backward(self, data: Sequence[Datum], loss_fn: str) -> float:
        op = ForwardBackward(data=tuple(data), loss_fn=loss_fn)
        return self._engine.forward_backward("m", op).metrics["loss:sum"]


def _datum(example: Example, **inputs: np.ndarray) -> Datum:
    tensors = {key: _wire(values, "float32", "<f4") for key, values in inputs.items()}
    tensors["target_tokens"] = _wire(example.targets, "int64", "<i8")
    return Datum(tokens=_wire(example.tokens, "int32", "<i4"), inputs=tensors)


def _wire(values: np.ndarray, dtype: str, stored: str) -> Tensor:
    return Tensor(dtype, values.shape, values.astype(stored).tobytes())


class ClientTenant:
    """A model of a server, trained with the unmodified client."""

    def __init__(self, model: object, learning_rate: float) -> None:
        from tinker import types

        self._model, self._types = model, types
        self._adam = types.AdamParams(learning_rate=learning_rate)

    def cross_entropy(self, batch: Sequence[Example]) -> float:
        data = [self._datum(e, weights=e.weights) for e in batch]
        return self._forward_backward(data, "cross_entropy")

    def importance_sampling(self, batch: Sequence[Example], sampled: Sequence[np.ndarray]) -> float:
        pairs = zip(batch, sampled, strict=True)
        data = [self._datum(e, logprobs=q, advantages=e.advantages) for e, q in pairs]
        return self._forward_backward(data, "importance_sampling")

    def step(self) -> None:
        self._model.optim_step(self._adam).result()

    def logprobs(self, batch: Sequence[Example]) -> list[np.ndarray]:
        data = [self._datum(e, weights=np.ones(len(e.tokens), np.float32)) for e in batch]
        outputs = self._model.forward(data, "cross_entropy").result().loss_fn_outputs
        return [np.array(one["logprobs"].data, np.float32) for one in outputs]

    def _forward_backward(self, data: Sequence[object], loss_fn: str) -> float:
        return self._model.forward_backward(data, loss_fn).result().metrics["loss:sum"]

    def _datum(self, example: Example, **inputs: np.ndarray) -> object:
        return self._types.Datum(
            model_input=self._types.ModelInput.from_ints(example.tokens.tolist()),
            loss_fn_inputs={"target_tokens": example.targets, **inputs},
        )
