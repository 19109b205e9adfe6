"""The loss functions by name, with their inputs, settings and defaults."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tinsmith.errors import NotSupported
from tinsmith_trainer import custom_loss, formulas
from tinsmith_trainer.loss import HIGH, LOW, Loss, listed

if TYPE_CHECKING:
    from collections.abc import Mapping

_POLICY: dict[str, float | str | None] = {"logprobs": None, "advantages": None}
_CLIPPED = {**_POLICY, LOW: LOW, HIGH: HIGH}  # per token, else as configured
_PPO_BOUNDS = {LOW: 0.8, HIGH: 1.2}

_ALL = (
    Loss("cross_entropy", {"weights": 1.0}, {}, formulas.cross_entropy, takes_rows=True),
    Loss("importance_sampling", _POLICY, {}, formulas.importance_sampling),
    Loss("ppo", _CLIPPED, _PPO_BOUNDS, formulas.ppo, clipped=formulas.is_ppo_clipped),
    Loss(
        "cispo",
        _CLIPPED,
        {LOW: 0.0, HIGH: 4.0},
        formulas.cispo,
        clipped=formulas.is_cispo_clipped,
    ),
    Loss("dro", _POLICY, {"beta": 0.05}, formulas.dro),
    Loss(
        "gspo",
        # Without a mask: the tokens that have an advantage. Prompts have none.
        {**_CLIPPED, "sequence_ratio_mask": "advantages"},
        _PPO_BOUNDS,
        formulas.gspo,
        prepare=formulas.sequence_ratio,
        clipped=formulas.is_gspo_clipped,
    ),
    Loss(
        "stable_reinforce",
        {**_POLICY, "sequence_ratio_mask": 1.0},
        {"kl_coeff": 0.01},
        formulas.stable_reinforce,
        clipped=formulas.is_capped,
        needs_provenance=True,
        texts=("mode",),  # of an objective that is not published
    ),
)
LOSSES = {loss.name: loss for loss in _ALL}


def chosen(name: str, config: Mapping[str, float | str]) -> tuple[Loss, dict[str, float]]:
    """The loss that a request names, and its settings.

    Raises:
        NotSupported: there is none of this name; never another one in its place.
        InvalidRequest: its configuration is wrong.
    """
    if name == custom_loss.NAME:
        return custom_loss.from_config(config), {}
    loss = find(name)
    return loss, loss.configure(config)


def find(name: str) -> Loss:
    """The loss of the table called ``name``; NotSupported when there is none."""
    if name not in LOSSES:
        names = listed([*LOSSES, custom_loss.NAME])
        raise NotSupported(f"loss_fn: {name!r} is not available on this server; use {names}")
    return LOSSES[name]
