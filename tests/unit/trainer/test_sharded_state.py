"""A model that is trained whole, with a slice of its state on each rank: as on one, bit for bit."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, NamedTuple

import pytest
import torch
from msgspec import structs
from tests.unit.trainer.examples import cross_entropy, random_datum
from tests.unit.trainer.ranked import Task, on_one_rank, on_ranks, repeated
from tests.unit.trainer.test_ranks import check_equal, check_near

from tinsmith import model_files
from tinsmith.errors import InvalidRequest, NoRoom, StartupError, UnusableGradient
from tinsmith.messages.ops import LoraShape, OptimStep
from tinsmith.testing import tiny_model
from tinsmith_trainer import base_model
from tinsmith_trainer.layout import Layout, Part
from tinsmith_trainer.optim import NORM_BLOCK, block_norms, joined, norm_of
from tinsmith_trainer.parts import Past
from tinsmith_trainer.ranks import Ranks
from tinsmith_trainer.room import Room
from tinsmith_trainer.shares import rounds
from tinsmith_trainer.slices import Slices
from tinsmith_trainer.telling import Telling

if TYPE_CHECKING:
    from pathlib import Path

    from tests.unit.trainer.ranked import Outcome

    from tinsmith_trainer.engine import TrainingEngine

CPU = torch.device("cpu")
WITHIN = {"float32": 1e-5, "bfloat16": 5e-2}
"""A weight that is rounded to the other neighbour, for its master's last bit, moves far more."""


class Runs(NamedTuple):
    """Of one model."""

    task: Task
    one: Outcome  # by one rank
    two: Outcome  # by two with slices
    two_again: Outcome  # as their log has it
    two_as_one: Outcome  # by two, as the log of one has it
    two_after_one: Outcome  # by two, from the checkpoint of one
    two_afresh: Outcome  # likewise, without its optimizer


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def runs(
    request: pytest.FixtureRequest, tiny_llama: Path, tmp_path_factory: pytest.TempPathFactory
) -> Runs:
    task = Task(str(tiny_llama), "tiny:full", sharding="weights", dtype=request.param)
    (one,) = on_one_rank([task])
    after = structs.replace(task, files=one.files)
    afresh = structs.replace(after, with_optimizer=False)
    given = [task, repeated(task, one), after, afresh]
    found = on_ranks(given, tmp_path_factory.mktemp("two"))
    return Runs(task, one, found[0], found[1], found[2], found[4], found[6])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_two_ranks_with_slices_compute_what_one_does(runs: Runs):
    check_near(runs.two, runs.one, WITHIN[runs.task.dtype])

    assert runs.two.states[0] == runs.one.states[0]  # that of the base
    assert all(done.by_pass for done in runs.two.done)
    assert {step.norm_block for step in runs.two.steps} == {NORM_BLOCK}


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_logs_with_and_without_slices_are_repeated_by_each_other_bit_for_bit(
    runs: Runs, tmp_path: Path
):
    again = repeated(runs.task, runs.two)
    (by_one,) = on_one_rank([again])
    (by_two_wholes, _) = on_ranks([structs.replace(again, sharding="none")], tmp_path)

    for found, expected in (
        (runs.two_again, runs.two),
        (by_one, runs.two),
        (by_two_wholes, runs.two),
        (runs.two_as_one, runs.one),
    ):
        check_equal(found, expected)
        assert found.steps == expected.steps


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_checkpoints_go_from_slices_to_one_rank_and_back(runs: Runs):
    after = structs.replace(runs.task, files=runs.two.files)
    afresh = structs.replace(after, with_optimizer=False)
    of_two, two_afresh = on_one_rank([after, afresh])
    begun = structs.replace(after, files=runs.one.files)
    of_one, one_afresh = on_one_rank([begun, structs.replace(begun, with_optimizer=False)])

    for found, expected in (
        (runs.two_after_one, of_one),
        (of_two, of_one),
        (runs.two_afresh, one_afresh),
        (two_afresh, one_afresh),
    ):
        check_near(found, expected, WITHIN[runs.task.dtype])
    assert runs.two_after_one.states[0] == of_one.states[0] == runs.one.states[-1]
    assert of_two.states[0] == runs.two.states[-1]


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_rank_holds_its_slice_of_the_state_and_nothing_more(runs: Runs):
    numbers = runs.one.state_bytes // 16

    assert NORM_BLOCK < numbers <= 2 * NORM_BLOCK
    assert runs.two.state_bytes == 16 * NORM_BLOCK
    assert runs.two.gradients_left == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_what_fails_with_slices_fails_on_all_ranks_and_changes_nothing(runs: Runs):
    """Losses and gradients that are not finite, and passes that fail on one rank alone."""
    assert [why.partition(":")[0] for why in runs.two.refusals] == [
        "data[2]",
        "on one rank",
        "on one rank",
    ] * len(runs.two.steps)
    assert runs.two.unusable == ["gradient"] * len(runs.two.steps)
    assert runs.two.not_supported.startswith("optimizer: 'dimuon' steps whole matrices")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_more_ranks_than_slices_experts_and_an_output_layer_that_is_not_tied(tmp_path: Path):
    folder = tiny_model.build(tmp_path / "model", family="qwen3_moe")
    task = Task(str(folder), "tiny:full", sharding="weights", checkpointing=True, ranks=4)
    (sliced, _) = on_ranks([task], tmp_path)
    (one,) = on_one_rank([repeated(task, sliced)])

    check_equal(one, sliced)
    assert one.state_bytes <= 3 * 16 * NORM_BLOCK  # the last of four has nothing


class Sole:
    """What slices ask of ranks, where nothing is exchanged."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


@pytest.mark.parametrize("size", [1, NORM_BLOCK, 3 * NORM_BLOCK + 7, 64 * NORM_BLOCK])
@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_slices_are_consecutive_and_cover_the_array(size: int, ranks: int):
    slices = [Slices(_ranks(Sole(rank, ranks)), size, CPU) for rank in range(ranks)]
    mine = [one.mine for one in slices]

    assert [one.start for one in mine[1:]] == [one.stop for one in mine[:-1]]
    assert (mine[0].start, mine[-1].stop) == (0, size)
    assert all(one.start % NORM_BLOCK == 0 or one.start == size for one in mine)
    assert all(slices[0].of(rank) == one for rank, one in enumerate(mine))
    share = -(-size // ranks)
    assert max(one.stop - one.start for one in mine) < share + NORM_BLOCK


def test_the_norm_of_blocks_does_not_depend_on_who_has_them():
    gradient = torch.randn(5 * NORM_BLOCK + 11, generator=torch.Generator().manual_seed(0))
    whole = norm_of(gradient, NORM_BLOCK)
    parts = [gradient[: 2 * NORM_BLOCK].clone(), gradient[2 * NORM_BLOCK :].clone()]
    norms = [norm for part in reversed(parts) for norm in block_norms(part, NORM_BLOCK)]

    assert joined(norms) == whole
    assert whole == pytest.approx(float(gradient.double().norm()), rel=1e-6)
    assert joined([]) == 0.0


@pytest.mark.parametrize("value", [math.nan, math.inf, 1e19])
def test_a_block_that_no_step_can_use_makes_the_norm_unusable(value: float):
    gradient = torch.ones(3 * NORM_BLOCK)
    gradient[-1] = value

    with pytest.raises(UnusableGradient):
        norm_of(gradient, NORM_BLOCK)


def test_blocks_of_a_log_that_no_version_made_are_refused(engine: TrainingEngine):
    engine.create("m", LoraShape(rank=1))
    engine.forward_backward("m", cross_entropy(random_datum(9)))
    with pytest.raises(InvalidRequest, match=r"norm_block: 3 is neither 0 nor 65536"):
        engine.optim_step("m", OptimStep(learning_rate=1e-3), Past(norm_block=3))


def test_what_lies_between_two_places_of_a_layout():
    layout = Layout([Part("a", (2, 3)), Part("b", (4,)), Part("c", (1,))])

    assert list(layout.between(4, 8)) == [
        ("a", slice(4, 6), slice(0, 2)),
        ("b", slice(0, 2), slice(2, 4)),
    ]
    assert list(layout.between(10, 11)) == [("c", slice(0, 1), slice(0, 1))]
    assert list(layout.between(3, 3)) == []

    holed = Layout([Part("a", (2,)), Part("empty", (0, 5)), Part("c", (1,))])
    assert [name for name, _, _ in holed.between(0, 3)] == ["a", "c"]


def test_each_round_of_slices_is_added_up_by_itself():
    assert rounds(5, 2, at_once=True, is_apart=True) == [[(0, 1)], [(2, 3)], [(4,)]]


def test_a_rank_with_a_slice_needs_less_room_than_one_with_all(
    tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
):
    files = model_files.find(str(tiny_llama))
    need = 3 * files.weight_bytes("float32") + files.state_bytes(4)
    monkeypatch.setattr(base_model.memory, "available_bytes", lambda: need)

    base_model.load(str(tiny_llama), name="tiny:full", device="cpu", shards=4)
    with pytest.raises(StartupError, match=r'set trainer.sharding to "weights".*full = true'):
        base_model.load(str(tiny_llama), name="tiny:full", device="cpu")
    with pytest.raises(StartupError, match=r"for the gradient of a pass.*use more ranks"):
        base_model.load(str(tiny_llama), name="tiny:full", device="cpu", shards=3)


def test_a_pass_with_slices_has_room_for_its_gradient(engine: TrainingEngine):
    base = engine._passes._base
    plain, sliced = (
        Room(base, lambda tokens: 100 * tokens, checkpointing=False, gradient_bytes=size)
        for size in (0, 1 << 20)
    )

    plain.check_whole(1 << 20)
    with pytest.raises(NoRoom, match="made without slices"):
        plain.check_whole(1 << 60)
    for with_gradient, more in ((True, 1 << 20), (False, 0)):
        found = [room.bytes_of(9, with_gradient=with_gradient) for room in (plain, sliced)]
        assert found[1] - found[0] == more


class Ended(SystemExit):
    """In the place of the process."""


class Alone:
    """A rank of two, the other of which is not there."""

    rank, size, is_first = 0, 2, True
    _log: Any = None

    def line(self) -> None:
        pass

    def send(self, *_: object) -> None:
        pass

    def fail(self, why: str, **_: object) -> None:
        raise Ended(why)


class Tenant:
    """With a state of five numbers."""

    def __init__(self) -> None:
        self.weights = torch.zeros(5)
        self.optimizer: Any = self
        self.exp_avg = self.exp_avg_sq = torch.zeros(5)


def _ranks(stand_in: object) -> Any:
    return stand_in


def test_a_state_that_is_not_read_to_its_end_ends_the_rank():
    ranks = _ranks(Alone())
    telling, tenant = Telling(ranks, Slices(ranks, 9, CPU)), _ranks(Tenant())
    telling.tenant = tenant
    pieces = telling.read(tenant)
    next(pieces)

    with pytest.raises(Ended, match="not read to its end"):
        pieces.close()


def test_a_rank_that_fails_alone_among_all_ends():
    ranks = _ranks(Alone())
    with pytest.raises(Ended, match="this rank alone"), Ranks.in_step(ranks):
        raise MemoryError
    with pytest.raises(UnusableGradient), Ranks.in_step(ranks):
        raise UnusableGradient("of all ranks")
