from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest
from tinker import types

from tinsmith.demo import loop


def datum(token: int) -> types.Datum:
    return types.Datum(
        model_input=types.ModelInput.from_ints([token, token]),
        loss_fn_inputs={"weights": types.TensorData.from_numpy(np.array([0, 2], np.float32))},
    )


def tokens(batch: list[types.Datum]) -> list[int]:
    return [one.model_input.to_ints()[0] for one in batch]


class Recorder:
    """Stands for a training client: it notes in which order things are asked and waited for."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.rates: list[float] = []

    def forward_backward(self, data: list[types.Datum], loss_fn: str) -> SimpleNamespace:
        assert loss_fn == "cross_entropy"
        return self._future("forward_backward", SimpleNamespace(metrics={"loss:sum": 6.0}))

    def optim_step(self, adam_params: types.AdamParams) -> SimpleNamespace:
        self.rates.append(adam_params.learning_rate)
        return self._future("optim_step", None)

    def _future(self, name: str, value: object) -> SimpleNamespace:
        self.events.append(name)
        return SimpleNamespace(result=lambda: self.events.append(f"{name} waited for") or value)


def test_every_epoch_has_every_datum_once():
    work = [
        token for batch in loop.batches([datum(n) for n in range(25)]) for token in tokens(batch)
    ]
    epochs = [work[start : start + 25] for start in range(0, len(work), 25)]

    assert [sorted(epoch) for epoch in epochs] == [list(range(25))] * loop.EPOCHS


def test_epochs_are_shuffled_differently_but_always_the_same_way():
    data = [datum(n) for n in range(20)]
    first, second = (list(map(tokens, loop.batches(data))) for _ in range(2))

    assert first == second
    assert first[:2] != first[2:4]


def test_the_next_step_is_submitted_before_the_last_one_is_waited_for():
    client = Recorder()
    list(loop.train(client, [[datum(1)], [datum(2)]]))  # type: ignore[arg-type]

    assert client.events[:5] == [
        "forward_backward",
        "optim_step",
        "forward_backward",
        "optim_step",
        "forward_backward waited for",
    ]
    assert client.events.count("optim_step waited for") == 2


def test_the_loss_is_per_token_that_has_weight():
    (step,) = loop.train(Recorder(), [[datum(1), datum(2)]])  # type: ignore[arg-type]

    assert (step.number, step.tokens) == (1, 4)
    assert step.loss_per_token == pytest.approx(6.0 / 4.0)


def test_the_learning_rate_falls_linearly():
    client = Recorder()
    list(loop.train(client, [[datum(n)] for n in range(4)]))  # type: ignore[arg-type]

    assert client.rates == pytest.approx([loop.LEARNING_RATE * f for f in (1, 0.75, 0.5, 0.25)])
