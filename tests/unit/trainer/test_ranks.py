"""Two ranks: as one within rounding, and bit for bit where a log says how it was added up."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import pytest
from safetensors.numpy import load as read
from tests.unit.trainer.examples import cross_entropy, logprobs, random_datum
from tests.unit.trainer.ranked import Task, on_one_rank, on_two_ranks, repeated

from tinsmith.errors import InvalidRequest
from tinsmith.messages.ops import LoraShape
from tinsmith_trainer.parts import Past
from tinsmith_trainer.shares import rounds

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.trainer.ranked import Outcome

    from tinsmith_trainer.engine import TrainingEngine

OPTIMIZERS = ("adamw", "dimuon")


class Runs(NamedTuple):
    """Of one model with one optimizer."""

    task: Task
    one: Outcome  # by one rank
    two: Outcome  # by two
    two_again: Outcome  # as their log has it
    two_as_one: Outcome  # by two, as the log of one has it
    two_after_one: Outcome  # by two, from the checkpoint of one


@pytest.fixture(scope="module", params=["tiny", "tiny:full"], ids=["lora", "full"])
def both(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> list[Runs]:
    """With each optimizer."""
    tasks = [Task(str(tiny_llama), request.param, optimizer) for optimizer in OPTIMIZERS]
    ones = on_one_rank(tasks)
    given = [
        one_more
        for task, one in zip(tasks, ones, strict=True)
        for one_more in (task, repeated(task, one), continued(task, one))
    ]
    found = on_two_ranks(given, tmp_path_factory.mktemp("two"))
    return [
        Runs(task, one, *found[start : start + 3], found[start + 4])
        for task, one, start in zip(tasks, ones, (0, 6), strict=True)
    ]


def continued(task: Task, outcome: Outcome) -> Task:
    return Task(task.folder, task.name, task.optimizer, files=outcome.files)


def check_near(found: Outcome, expected: Outcome) -> None:
    for ours, theirs in zip(found.done, expected.done, strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5, abs=1e-5)
        for mine, other in zip(logprobs(ours), logprobs(theirs), strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert found.files.keys() == expected.files.keys()
    for name in found.files:
        if name.endswith(".safetensors") and "optim" not in name:
            theirs = read(expected.files[name])
            for key, mine in read(found.files[name]).items():
                np.testing.assert_allclose(mine, theirs[key], rtol=0, atol=1e-5, err_msg=key)


def check_equal(found: Outcome, expected: Outcome) -> None:
    assert found.states == expected.states
    assert found.done[:-1] == expected.done[:-1]
    assert found.files == expected.files


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_compute_what_one_does(both: list[Runs]):
    for runs in both:
        check_near(runs.two, runs.one)
        assert {done.ranks for done in runs.two.done} == {2}
        assert runs.two.refusals == runs.one.refusals
        assert all("data[2]: its loss" in refusal for refusal in runs.two.refusals)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_log_of_any_number_of_ranks_is_repeated_by_any_other_bit_for_bit(both: list[Runs]):
    for runs in both:
        check_equal(runs.two_again, runs.two)
        check_equal(runs.two_as_one, runs.one)
        check_equal(on_one_rank([repeated(runs.task, runs.two)])[0], runs.two)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_checkpoints_go_from_two_ranks_to_one_and_back(both: list[Runs]):
    for runs in both:
        of_two, of_one = on_one_rank([continued(runs.task, one) for one in (runs.two, runs.one)])

        check_near(of_two, of_one)
        check_near(runs.two_after_one, of_one)


@pytest.mark.parametrize("ranks", [-1, 0, 65])
def test_a_number_of_ranks_that_cannot_be_is_refused(engine: TrainingEngine, ranks: int):
    engine.create("m", LoraShape(rank=1))
    with pytest.raises(InvalidRequest, match=r"ranks: .* damaged"):
        engine.forward_backward("m", cross_entropy(random_datum(9)), Past(ranks=ranks))


def test_each_pass_is_made_once_and_idle_ranks_are_last():
    for passes in range(1, 9):
        for shares in range(1, 5):
            (at_once,) = rounds(passes, shares, at_once=True)
            by_share = rounds(passes, shares, at_once=False)

            assert sum(at_once, ()) == tuple(range(passes))
            assert all(len(one) == shares for one in at_once[:-1])
            assert len(by_share) == shares
            for share, own in enumerate(by_share):
                assert sum(own, ()) == tuple(k for k in range(passes) if k % shares == share)
