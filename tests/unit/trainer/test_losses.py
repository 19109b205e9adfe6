"""The loss functions and what they take."""

from __future__ import annotations

import pytest
import torch

from tinsmith.errors import InvalidRequest, NotSupported
from tinsmith_trainer import losses


def test_cross_entropy_is_the_negative_weighted_sum_and_its_slope():
    logprobs = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    weights = torch.tensor([1.0, -0.25, 0.0])

    value, slope = losses.cross_entropy(logprobs, {"weights": weights}, {})
    value.sum().backward()

    assert value.tolist() == [1.0, -0.5, 0.0]
    assert torch.equal(slope, logprobs.grad)


def test_an_unknown_loss_names_those_that_exist():
    with pytest.raises(NotSupported, match=r"'ppo' is not available .*; use cross_entropy"):
        losses.find("ppo")


@pytest.mark.parametrize("value", [0.2, "text"])
def test_a_setting_that_the_loss_lacks_is_refused(value: float | str):
    with pytest.raises(InvalidRequest, match=r"loss_fn_config\['clip'\]: .* it takes none"):
        losses.find("cross_entropy").configure({"clip": value})


def test_settings_override_defaults_and_must_be_numbers():
    loss = losses.Loss("l", {}, {"low": 0.8, "high": 1.2}, losses.cross_entropy)

    assert loss.configure({"high": 2.0}) == {"low": 0.8, "high": 2.0}
    with pytest.raises(InvalidRequest, match="'many' is not a number"):
        loss.configure({"low": "many"})
