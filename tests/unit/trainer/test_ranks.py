"""Two ranks: as one within rounding, and bit for bit where a log says how it was added up."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest
import torch.distributed as dist
from msgspec import structs
from safetensors.numpy import load as read
from tests.unit.trainer.examples import cross_entropy, logprobs, random_datum
from tests.unit.trainer.ranked import BATCHES, PATIENCE_S, Task, on_one_rank, on_ranks, repeated

from tinsmith.config import ModelConfig
from tinsmith.errors import ConfigError, InvalidRequest, StartupError
from tinsmith.messages.ops import LoraShape
from tinsmith.testing import tiny_model
from tinsmith_trainer import seat
from tinsmith_trainer.config import TrainerConfig
from tinsmith_trainer.loading import load
from tinsmith_trainer.meeting import agreed
from tinsmith_trainer.parts import Past
from tinsmith_trainer.seat import Seat
from tinsmith_trainer.sharded_base import ShardedBase
from tinsmith_trainer.shares import rounds

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.trainer.ranked import Outcome

    from tinsmith_trainer.engine import TrainingEngine

WHOLE_BYTES = 64 * 4
"""Of the last norm, which every rank has."""
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
    found = on_ranks(given, tmp_path_factory.mktemp("two"))
    return [
        Runs(task, one, *found[start : start + 3], found[start + 4])
        for task, one, start in zip(tasks, ones, (0, 6), strict=True)
    ]


def continued(task: Task, outcome: Outcome) -> Task:
    return Task(task.folder, task.name, task.optimizer, files=outcome.files)


def check_near(found: Outcome, expected: Outcome, within: float = 1e-5) -> None:
    for ours, theirs in zip(found.done, expected.done, strict=True):
        assert ours.metrics == pytest.approx(theirs.metrics, rel=within, abs=within)
        for mine, other in zip(logprobs(ours), logprobs(theirs), strict=True):
            np.testing.assert_allclose(mine, other, rtol=0, atol=within)
    assert found.norms == pytest.approx(expected.norms, rel=within)
    assert found.files.keys() == expected.files.keys()
    for name in found.files:
        if name.endswith(".safetensors") and "optim" not in name:
            theirs = read(expected.files[name])
            for key, mine in read(found.files[name]).items():
                np.testing.assert_allclose(mine, theirs[key], rtol=0, atol=within, err_msg=key)


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


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("both", ["tiny"], ids=["lora"], indirect=True)
def test_shards_change_no_bit_and_halve_what_a_rank_holds(both: list[Runs], tmp_path: Path):
    plain = both[0]
    task = structs.replace(plain.task, sharding="weights")
    after_one = structs.replace(task, files=plain.one.files)
    sharded, again, from_one, _ = on_ranks([task, after_one], tmp_path)

    check_equal(sharded, plain.two)
    check_equal(again, plain.two)
    check_equal(from_one, plain.two_after_one)
    check_near(sharded, plain.one)
    assert sharded.rescored == plain.two.rescored
    failures = [why for why in sharded.refusals if why not in plain.two.refusals]
    assert failures == ["on one rank"] * 2 * len(BATCHES)
    in_shards = plain.two.held_bytes - WHOLE_BYTES
    assert sharded.held_bytes == in_shards // 2 + WHOLE_BYTES


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_shards_of_experts_and_of_an_output_layer_that_is_not_tied(tmp_path: Path):
    folder = tiny_model.build(tmp_path / "model", family="qwen3_moe")
    task = Task(str(folder), "tiny", sharding="weights", checkpointing=True)
    (sharded, _) = on_ranks([task], tmp_path)

    check_equal(on_one_rank([repeated(task, sharded)])[0], sharded)


@pytest.mark.parametrize(
    ("ranks", "model", "why"),
    [
        (1, {}, "there is one rank, which holds all; set trainer.ranks to 2 or more"),
        (2, {"quantization": "nf4"}, "weights in nf4 cannot be taken apart"),
    ],
)
def test_what_cannot_be_in_shards_is_refused(
    tiny_llama: Path, ranks: int, model: dict[str, str], why: str
):
    given = ModelConfig(**({"name": "tiny", "path": str(tiny_llama)} | model))
    settings = TrainerConfig(device="cpu", ranks=ranks, sharding="weights")
    with pytest.raises(StartupError, match=f"trainer.sharding: tiny.*: {why}"):
        load(given, settings, Seat(0, ranks, "nowhere") if ranks > 1 else None)


class Full:
    """A unit for which there is no memory, and ranks that are told of it."""

    def reset_iter_state(self) -> None:
        pass

    def unshard(self) -> None:
        raise MemoryError

    def fail(self, why: str, **_: object) -> None:
        raise SystemExit(why)


def test_a_rank_that_cannot_join_in_a_round_ends_and_is_not_waited_for():
    sharded = object.__new__(ShardedBase)
    full: Any = Full()
    sharded._ranks, sharded._root, sharded._units = full, full, [full]
    sharded._down, sharded._up, sharded._is_tied = (0,), (), False

    with (
        pytest.raises(SystemExit, match="cannot join"),
        sharded.round(with_gradient=False),
    ):
        raise MemoryError


def test_torchrun_assigns_seats():
    said = {"RANK": "9", "WORLD_SIZE": "16", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "8"}
    meeting = {"MASTER_ADDR": "host", "MASTER_PORT": "29500"}

    assert seat.given(said | meeting) == Seat(9, 16, place=1, beside=8)
    assert seat.given(said) is None
    for wrong in ({"RANK": "16"}, {"LOCAL_RANK": "8"}, {"WORLD_SIZE": "all"}):
        with pytest.raises(ConfigError, match="are no place among ranks"):
            seat.given(said | meeting | wrong)


def until_answered(store: dist.HashStore, tokens: list[str]) -> None:
    """The second rank that is there now has read the last of ``tokens``, if there is one."""
    deadline = time.monotonic() + PATIENCE_S
    while tokens and store.get(f"{tokens[-1]}/1") in store.get(f"{tokens[-1]}/0").split():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_ranks_that_are_started_again_agree_on_keys_that_no_dead_one_has_used():
    store, tokens = dist.HashStore(), []
    with ThreadPoolExecutor(3) as threads:
        for _ in range(3):
            # The others come first, and find what was agreed on before.
            others = [threads.submit(agreed, store, Seat(rank, 3)) for rank in (2, 1)]
            until_answered(store, tokens)
            first = threads.submit(agreed, store, Seat(0, 3))
            tokens.append(first.result(PATIENCE_S))
            assert {other.result(PATIENCE_S) for other in others} == {tokens[-1]}

    assert len(set(tokens)) == 3


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
