"""Two ranks: as one within rounding, and bit for bit where a log says how it was added up."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import pytest
from tests.unit.trainer.examples import logprobs
from tests.unit.trainer.ranked import Task, on_one_rank, on_two_ranks
from safetensors.numpy import load as read

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.trainer.ranked import Outcome

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
KINDS = (("tiny", "adamw"), ("tiny", "dimuon"), ("tiny:full", "adamw"), ("tiny:full", "dimuon"))


@pytest.fixture(scope="module", params=KINDS, ids=lambda kind: "-".join(kind).replace(":", "-"))
def task(request: pytest.FixtureRequest, tiny_llama: Path) -> Task:
    name, optimizer = request.param
    return Task(folder=str(tiny_llama), name=name, optimizer=optimizer)


@pytest.fixture(scope="module")
def one(task: Task) -> Outcome:
    return on_one_rank(task)


@pytest.fixture(scope="module")
def two(task: Task, tmp_path_factory: pytest.TempPathFactory) -> Outcome:
    return on_two_ranks(task, tmp_path_factory.mktemp("two"))


def continued(task: Task, outcome: Outcome, **changes: object) -> Task:
    return Task(task.folder, task.name, task.optimizer, files=outcome.files, **changes)


def check_near(found: Outcome, expected: Outcome) -> None:
    for ours, theirs in zip(found.done, expected.done, strict=True):
        assert ours.passes == theirs.passes
        assert ours.metrics == pytest.approx(theirs.metrics, rel=1e-5, abs=1e-5)
        for mine, other in zip(logprobs(ours), logprobs(theirs), strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)
    assert found.files.keys() == expected.files.keys()
    for name in found.files:
        if name.endswith(".safetensors"):
            theirs = read(expected.files[name])
            for key, mine in read(found.files[name]).items():
                np.testing.assert_allclose(mine, theirs[key], rtol=0, atol=1e-5, err_msg=key)


def test_two_ranks_compute_what_one_does(one: Outcome, two: Outcome):
    check_near(two, one)
    assert {done.ranks for done in two.done} == {2}
    assert two.refusals == one.refusals
    assert all("data[2]" in refusal for refusal in two.refusals)


def test_one_rank_repeats_a_log_of_two_bit_for_bit(task: Task, two: Outcome):
    again = on_one_rank(Task(task.folder, task.name, task.optimizer, pasts=two.done))

    assert again.states == two.states
    assert again.done[:-1] == two.done[:-1]
    assert again.files == two.files


def test_two_ranks_repeat_their_own_log_and_that_of_one_bit_for_bit(
    task: Task, one: Outcome, two: Outcome, tmp_path: Path
):
    for expected in (one, two):
        pasts = Task(task.folder, task.name, task.optimizer, pasts=expected.done)
        again = on_two_ranks(pasts, tmp_path)

        assert again.states == expected.states
        assert again.done[:-1] == expected.done[:-1]
        assert again.files == expected.files


def test_checkpoints_go_from_two_ranks_to_one_and_back(
    task: Task, one: Outcome, two: Outcome, tmp_path: Path
):
    check_near(on_one_rank(continued(task, two)), on_one_rank(continued(task, one)))
    check_near(on_two_ranks(continued(task, one), tmp_path), on_one_rank(continued(task, one)))
