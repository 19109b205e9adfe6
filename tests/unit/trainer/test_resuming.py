"""Six steps, a save, three more: live, from the checkpoint, and from its weights alone."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
import safetensors.torch
import torch
from tests.unit.trainer.examples import logprobs
from tests.unit.trainer.resumed import (
    BEFORE,
    Found,
    Plan,
    on_one_rank,
    on_two_ranks,
    resumed,
    steps,
    ways,
)

from tinsmith.errors import InvalidRequest
from tinsmith.messages.ops import LoraShape
from tinsmith_trainer import peft_format
from tinsmith_trainer.checkpoint_files import to_files
from tinsmith_trainer.parts import Past
from tinsmith_trainer.state import digest

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.trainer.resumed import Leg
    from torch import Tensor

    from tinsmith_trainer.engine import TrainingEngine

KINDS = {
    "rank1": ("tiny", 1, "adamw"),
    "rank8": ("tiny", 8, "adamw"),
    "rank32": ("tiny", 32, "adamw"),
    "dimuon": ("tiny", 4, "dimuon"),
    "full": ("tiny:full", 0, "adamw"),
    "full-dimuon": ("tiny:full", 0, "dimuon"),
}


def plan_of(kind: str, folder: Path) -> Plan:
    return Plan(str(folder), *KINDS[kind])


def saved_weights(engine: TrainingEngine, files: dict[str, bytes]) -> dict[str, Tensor]:
    """What tools without any of our code read of a checkpoint, by the names of the layout."""
    layout = engine._adapters.get("m").layout
    name = "model.safetensors" if "model.safetensors" in files else "adapter_model.safetensors"
    tensors = safetensors.torch.load(files[name])
    if name == "model.safetensors":
        return tensors
    return {
        f"{target.name}.{factor}": tensors[theirs]
        for target in layout.targets
        for factor, theirs in zip("AB", peft_format.tensor_names(target), strict=True)
    }


def from_fresh(engine: TrainingEngine, plan: Plan, files: dict[str, bytes], like: Leg) -> Leg:
    """A model that was just created, its weights overwritten with those in ``files``."""
    engine.create("m", plan.shape, plan.optimizer)
    views = engine._adapters.get("m").layout.named(engine._adapters.get("m").weights)
    found = saved_weights(engine, files)
    assert found.keys() == views.keys()
    with torch.no_grad():
        for name, view in views.items():
            view.copy_(found[name])
    leg = steps(engine, plan, BEFORE, [Past.of(done) for done in like.done])
    engine.drop("m")
    return leg


def check(found: Found, engine: TrainingEngine, plan: Plan) -> None:
    """What a resumed run must be, however many ranks have made ``found``."""
    assert found.resumed == found.live
    assert found.weights_only.done[0].logprobs == found.live.done[0].logprobs
    assert not set(found.weights_only.states) & set(found.live.states)
    fresh = from_fresh(engine, plan, found.files, found.weights_only)
    assert fresh == found.weights_only


@pytest.mark.parametrize(
    "kind",
    [
        kind if kind in {"rank8", "full"} else pytest.param(kind, marks=pytest.mark.slow)
        for kind in KINDS
    ],
)
def test_a_resumed_run_is_the_live_one_and_without_its_optimizer_a_fresh_one(
    tiny_llama: Path, kind: str
):
    plan = plan_of(kind, tiny_llama)
    engine = on_one_rank(plan.folder, plan.name)

    check(ways(engine, plan), engine, plan)


class Both(NamedTuple):
    plan: Plan
    one: Found
    two: Found
    two_from_one: Leg
    one_from_two: Leg


@pytest.fixture(scope="module", params=["lora", "full"])
def both(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[TrainingEngine, list[Both]]:
    """One and two ranks, each going on from its own checkpoint and from the other's."""
    kinds = [kind for kind in KINDS if kind.startswith("full") == (request.param == "full")]
    plans = [plan_of(kind, tiny_llama) for kind in kinds]
    engine = on_one_rank(plans[0].folder, plans[0].name)
    ones = [ways(engine, plan) for plan in plans]
    report = on_two_ranks(plans, tmp_path_factory.mktemp("two"), [one.files for one in ones])
    found = []
    for plan, one, two, crossed in zip(plans, ones, report.ways, report.from_one, strict=True):
        pasts = [Past.of(done) for done in two.live.done]
        back = resumed(engine, plan, two.files, pasts, with_optimizer=True)
        found.append(Both(plan, one, two, crossed, back))
    return engine, found


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_two_ranks_resume_as_one_does(both: tuple[TrainingEngine, list[Both]]):
    engine, found = both
    for one in found:
        assert {done.ranks for done in one.two.live.done} == {2}
        check(one.two, engine, one.plan)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_checkpoint_goes_on_with_another_number_of_ranks(
    both: tuple[TrainingEngine, list[Both]],
):
    for one in both[1]:
        # One rank adds up as two do when it is told to, and then the bits are theirs.
        assert one.one_from_two == one.two.live
        # Two ranks add up in another order: the first pass is the same, then roundings differ.
        assert one.two_from_one.done[0].logprobs == one.one.live.done[0].logprobs
        assert {done.ranks for done in one.two_from_one.done} == {2}
        for crossed, own in zip(one.two_from_one.done, one.one.live.done, strict=True):
            for ours, theirs in zip(logprobs(crossed), logprobs(own), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-4)


def test_the_shape_comes_from_the_checkpoint(engine: TrainingEngine, tiny_llama: Path):
    plan = Plan(str(tiny_llama), "tiny", 8)
    found = ways(engine, plan)

    done = engine.restore("m", found.files, with_optimizer=True)

    assert done.lora == plan.shape
    assert digest(engine.state("m")) == found.saved


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("rank", 4),
        ("alpha", 32.0),
        ("train_attn", False),
        ("train_mlp", False),
        ("train_unembed", False),
    ],
)
def test_another_shape_is_refused_with_both_sides(
    engine: TrainingEngine, field: str, value: object
):
    ours, other = LoraShape(rank=8, alpha=8.0), {"rank": 8, "alpha": 8.0, field: value}
    engine.create("saved", ours)
    files = dict(to_files(engine.snapshot("saved"), with_optimizer=True))
    engine.create("m", LoraShape(**other))
    before = digest(engine.state("m"))

    for with_optimizer in (True, False):
        words = rf"{field}: the checkpoint has {getattr(ours, field)}, this model has {value}; "
        with pytest.raises(InvalidRequest, match=words):
            engine.restore("m", files, with_optimizer=with_optimizer)

    assert digest(engine.state("m")) == before
