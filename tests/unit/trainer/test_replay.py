"""A replay finds what differs, where it differs, and nothing else."""

from __future__ import annotations

import asyncio
import signal
import struct
from typing import TYPE_CHECKING

import msgspec
import pytest
from tests.unit.trainer.examples import cross_entropy, random_datum
from tests.unit.trainer.recorded import RUN, ListLogbook, Recorder

from tinsmith.cli.replay import Options
from tinsmith.config import Config, ModelConfig
from tinsmith.errors import BlobMissing, ConfigError, InvalidRequest, NotFound, ServerError
from tinsmith.messages import ops
from tinsmith.messages.base import Failed, Tensor
from tinsmith.testing import tiny_model
from tinsmith_trainer.replay import _until_stopped, replay

if TYPE_CHECKING:
    from pathlib import Path

    from tinsmith_trainer.replay_report import Summary

X, Y, Z = (random_datum(length, seed=length) for length in (20, 33, 40))
STEP = ops.OptimStep(learning_rate=1e-2)
BAD = ops.ForwardBackward(data=(X,), loss_fn="no_such_loss")
GONE = Failed(category="user", message="no such checkpoint", code="NotFound")
NEVER_CAME = Failed(category="user", message="request 16 of this model never arrived")
REFUSED = ops.Refused(reason=Failed(category="user", message="x", code="InvalidRequest"))
SAVES, READS, FAILS, LOADS, LAST = 7, 4, 5, 9, 17


@pytest.fixture(scope="module")
def recorder(tiny_llama: Path) -> Recorder:
    """A run with everything in it; states are saved after ops 6 and 11."""
    run = Recorder(tiny_llama)
    run.do(ops.CreateModel(base_model="tiny", lora=ops.LoraShape(rank=4, seed=3)))
    run.do(cross_entropy(X))
    run.do(STEP)
    parts = run.parts()
    run.do(cross_entropy(Y, Z, X))
    run.do(cross_entropy(X, forward_only=True))
    run.do(BAD)
    run.do(STEP)
    run.save_state()
    run.do(ops.SaveWeights(name="x"), ops.SaveWeightsDone(path="x", size_bytes=1))
    run.do(cross_entropy(Y))
    run.load(parts)
    run.do(cross_entropy(Z))
    run.do(STEP)
    run.save_state()
    run.do(REFUSED)
    run.do(cross_entropy(Y))
    run.do(STEP)
    run.do(ops.LoadWeights(path="tinker://gone"), GONE)
    run.seq += 1
    run.do(STEP, NEVER_CAME)
    return run


@pytest.fixture
def book(recorder: Recorder) -> ListLogbook:
    """The run's log, to be changed at will."""
    return recorder.book()


@pytest.fixture
def replayed(tiny_llama: Path):
    """Replays a logbook on the right base model, with the options given."""

    async def call(book: ListLogbook, folder: Path = tiny_llama, **options: object) -> Summary:
        config = Config(models=(ModelConfig(name="tiny", path=str(folder)),))
        return await replay(RUN, book, Options(target="", **options), config)

    return call


def place(summary: Summary) -> tuple[int, str, str] | None:
    at = summary.divergence
    return None if at is None else (at.seq, at.op, at.field)


def saved_states(book: ListLogbook | Recorder) -> list[ops.StateSaved]:
    return [entry for entry in book.list if isinstance(entry, ops.StateSaved)]


def flipped(tensor: Tensor, index: int) -> Tensor:
    """The lowest bit of one number, which changes nothing that prints in six digits."""
    data = bytearray(tensor.data)
    data[4 * index] ^= 1
    return Tensor(tensor.dtype, tensor.shape, bytes(data))


def forge_logprob(book: ListLogbook, seq: int, change=flipped) -> None:
    done = book.result(seq)
    forged = (change(done.logprobs[0], 3), *done.logprobs[1:])
    book.forge_result(seq, msgspec.structs.replace(done, logprobs=forged))


async def test_a_run_replays_bit_for_bit(book, replayed):
    summary = await replayed(book)

    assert summary.verdict == "equal"
    assert summary.warnings == ()
    assert (summary.first_op, summary.last_op) == (0, LAST)
    assert summary.ops_compared == 14
    assert summary.states_compared == 6
    assert summary.ops_not_repeated == {"saves": 1, "failures outside of the engine": 2}


async def test_a_flipped_bit_in_a_result_is_found(book, replayed):
    forge_logprob(book, 3)

    summary = await replayed(book)

    assert place(summary) == (3, "forward_backward", "logprobs[0][3]")
    assert summary.divergence.expected != summary.divergence.found


async def test_a_flipped_bit_in_a_result_of_a_pass_without_gradient_is_found(book, replayed):
    forge_logprob(book, READS)

    assert place(await replayed(book)) == (READS, "forward_backward", "logprobs[0][3]")


async def test_a_changed_metric_is_found(book, replayed):
    done = book.result(1)
    metrics = done.metrics | {"loss:sum": done.metrics["loss:sum"] + 1e-9}
    book.forge_result(1, msgspec.structs.replace(done, metrics=metrics))

    assert place(await replayed(book)) == (1, "forward_backward", "metrics[loss:sum]")


async def test_a_changed_learning_rate_is_found_in_the_state(book, replayed):
    book.forge_op(6, msgspec.structs.replace(STEP, learning_rate=1.0001e-2))

    assert place(await replayed(book)) == (6, "optim_step", "state")


async def test_a_wrong_state_is_found(book, replayed):
    book.replace(book.record(2), state_blake3="0" * 64)

    summary = await replayed(book)

    assert place(summary) == (2, "optim_step", "state")
    assert summary.divergence.expected == "0" * 64


async def test_a_state_that_was_left_out_is_found(book, replayed):
    book.replace(book.record(2), state_blake3="")

    assert place(await replayed(book)) == (2, "optim_step", "state")


async def test_a_wrong_saved_state_is_found(book, replayed):
    saved = saved_states(book)[0]
    book.replace(saved, state_blake3="0" * 64)

    assert place(await replayed(book)) == (saved.seq, "state_saved", "state")


async def test_a_success_that_should_have_failed_is_found(book, replayed):
    book.forge_result(FAILS, book.result(1))

    assert place(await replayed(book)) == (FAILS, "forward_backward", "result")


async def test_a_failure_that_should_have_gone_well_is_found(book, replayed):
    book.forge_result(2, Failed(category="user", message="x", code="InvalidRequest"))

    assert place(await replayed(book)) == (2, "optim_step", "result")


async def test_a_failure_may_have_other_words_but_no_other_kind(book, replayed):
    failed = book.result(FAILS)
    book.forge_result(FAILS, msgspec.structs.replace(failed, message="other words"))
    assert (await replayed(book)).verdict == "equal"

    book.forge_result(FAILS, msgspec.structs.replace(failed, code="NotFound"))
    assert place(await replayed(book)) == (FAILS, "forward_backward", "code")


async def test_an_answer_of_another_kind_is_found(book, replayed):
    book.forge_result(SAVES, book.result(2))

    assert place(await replayed(book)) == (SAVES, "save_weights", "result")


async def test_an_op_of_another_place_is_found(book, replayed):
    record = book.record(3)
    book.replace(book.record(1), op=record.op, op_blake3=record.op_blake3)

    assert place(await replayed(book)) == (1, "forward_backward", "op")


async def test_an_op_that_happened_twice_is_found(book, replayed):
    book.list.append(book.record(2))
    book.list.append(msgspec.structs.replace(book.record(14), seq=18))

    assert place(await replayed(book)) == (2, "record", "seq")


async def test_bytes_that_are_not_those_of_their_digest_are_found(book, replayed):
    damaged = bytearray(book.record(3).result)
    damaged[-1] ^= 1
    book.replace(book.record(3), result=bytes(damaged))

    assert place(await replayed(book)) == (3, "record", "result_blake3")


async def test_a_broken_chain_is_found(book, replayed):
    class Holed(ListLogbook):
        async def entries(self, model_id):
            async for item in super().entries(model_id):
                if getattr(item.entry, "seq", None) != 1:
                    yield item

    summary = await replayed(Holed(book.list, book.blobs))

    assert place(summary) == (2, "record", "prev_blake3")


async def test_a_part_is_replayed_from_the_newest_saved_state_before_it(book, replayed):
    summary = await replayed(book, first=8, last=10)

    assert summary.verdict == "equal"
    assert (summary.ops_compared, summary.ops_led_up) == (3, 0)
    assert summary.ops_not_repeated == {"saves": 1}


async def test_ops_before_the_first_are_repeated_but_not_compared(book, replayed):
    forge_logprob(book, 1)

    summary = await replayed(book, first=2, last=6)

    assert summary.verdict == "equal"
    assert summary.ops_led_up == 2


async def test_ops_after_the_last_are_not_repeated(book, replayed):
    book.replace(book.record(6), state_blake3="0" * 64)

    assert (await replayed(book, last=5)).verdict == "equal"
    assert (await replayed(book, last=6)).verdict == "diverged"


async def test_a_saved_state_behind_the_last_op_is_compared(book, replayed):
    saved = msgspec.structs.replace(saved_states(book)[0], seq=14)
    book.list.append(saved)

    assert place(await replayed(book)) == (saved.seq, "state_saved", "state")


async def test_a_file_cannot_be_followed(book, replayed):
    with pytest.raises(InvalidRequest, match="--follow: a file does not grow"):
        await replayed(book, is_following=True)


@pytest.mark.parametrize("option", [{"last": 3}, {"share": 0.5}])
async def test_what_is_followed_has_no_end_and_no_holes(book, replayed, option):
    with pytest.raises(InvalidRequest, match="drop --to and --spot-check"):
        await replayed(book, is_following=True, **option)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
async def test_a_signal_ends_what_has_no_end(number):
    async def work():
        signal.raise_signal(number)
        await asyncio.Event().wait()

    await _until_stopped(work())


async def test_a_failure_of_what_has_no_end_is_told():
    async def work():
        raise BlobMissing("gone")

    with pytest.raises(BlobMissing):
        await _until_stopped(work())


async def test_a_part_that_the_log_does_not_have_is_refused(book, replayed):
    with pytest.raises(InvalidRequest, match=f"--from: op 99 is not in the log.*{LAST}"):
        await replayed(book, first=99)
    with pytest.raises(InvalidRequest, match="--to: 3 is before --from 5"):
        await replayed(book, first=5, last=3)


async def test_every_segment_starts_from_its_own_saved_state(book, replayed):
    summary = await replayed(book, share=1.0)

    assert summary.verdict == "equal"
    assert (summary.segments, summary.segments_in_all) == (3, 3)
    assert summary.states_compared == 8


async def test_a_spot_check_replays_a_share_of_the_segments(book, replayed):
    summaries = [await replayed(book, share=0.3, seed=seed) for seed in range(4)]

    assert {summary.segments for summary in summaries} == {1}
    assert len({summary.first_op for summary in summaries}) > 1
    assert (await replayed(book, share=0.3, seed=3)).first_op == summaries[3].first_op


async def test_a_spot_check_tells_the_seed_that_repeats_it(book, replayed):
    told = await replayed(book, share=0.3)

    assert (await replayed(book, share=0.3, seed=told.seed)).first_op == told.first_op


async def test_a_saved_state_that_is_another_is_found_by_its_segment(book, replayed):
    first, second = saved_states(book)
    book.replace(first, parts=second.parts)

    assert place(await replayed(book, share=1.0)) == (6, "state_saved", "state")
    assert (await replayed(book)).verdict == "equal"  # its bytes are not asked for


async def test_a_saved_state_that_is_none_is_found_by_its_segment(book, replayed):
    saved = saved_states(book)[0]
    book.replace(saved, parts={})

    assert place(await replayed(book, share=1.0)) == (6, "state_saved", "parts")


async def test_a_saved_state_that_earlier_versions_wrote_as_a_checkpoint_is_a_start(
    tiny_llama, replayed
):
    run = Recorder(tiny_llama)
    run.do(ops.CreateModel(base_model="tiny", lora=ops.LoraShape(rank=4)))
    for _ in range(2):
        run.do(cross_entropy(X))
        run.do(STEP)
    run.save_state()
    old, parts = run.list[-1], run.parts()
    assert "manifest-00001" in old.parts
    run.list[-1] = msgspec.structs.replace(old, parts=parts)
    run.do(cross_entropy(X))
    run.do(STEP)
    summary = await replayed(run.book(), first=5)

    assert summary.verdict == "equal"
    assert summary.ops_led_up == 0


async def test_a_saved_state_without_a_digest_is_no_start(book, replayed):
    first, second = saved_states(book)
    book.replace(first, state_blake3="")
    book.replace(second, state_blake3="")

    summary = await replayed(book, first=13)
    assert summary.verdict == "equal"
    assert summary.ops_led_up == 12


async def test_a_load_of_other_parts_is_found(book, replayed):
    saved = saved_states(book)[0]
    done = book.result(LOADS)
    book.forge_result(LOADS, msgspec.structs.replace(done, parts=saved.parts))
    assert place(await replayed(book)) == (LOADS, "load_weights", "state")

    book.forge_result(LOADS, msgspec.structs.replace(done, parts={}))
    assert place(await replayed(book)) == (LOADS, "load_weights", "result")


async def test_a_model_made_from_a_checkpoint_replays(tiny_llama, recorder, replayed):
    saved = saved_states(recorder)[0]
    run = Recorder(tiny_llama)
    run.blobs = recorder.blobs
    run.create_from(saved.parts)
    run.do(cross_entropy(X))
    run.do(STEP)

    assert (await replayed(run.book())).verdict == "equal"


async def test_within_a_tolerance_numbers_may_differ(book, replayed):
    def moved(tensor: Tensor, index: int) -> Tensor:
        data = bytearray(tensor.data)
        (value,) = struct.unpack_from("<f", data, 4 * index)
        struct.pack_into("<f", data, 4 * index, value + 0.25)
        return Tensor(tensor.dtype, tensor.shape, bytes(data))

    forge_logprob(book, 3, moved)
    near, far = await replayed(book, tolerance=0.3), await replayed(book, tolerance=0.2)

    assert near.verdict == "equal"
    assert near.largest_difference.amount == pytest.approx(0.25, abs=1e-5)
    assert (near.largest_difference.seq, near.largest_difference.field) == (3, "logprobs[0][3]")
    assert place(far) == (3, "forward_backward", "logprobs[0][3]")


async def test_with_a_tolerance_states_are_not_compared(book, replayed):
    book.replace(book.record(2), state_blake3="0" * 64)

    summary = await replayed(book, tolerance=1e-6)

    assert summary.verdict == "equal"
    assert summary.states_compared == 0


async def test_every_owner_is_replayed_with_its_own_settings(tiny_llama, replayed):
    """Threads and the size of passes decide bits; here the passes of op 2 show it."""
    run = Recorder(tiny_llama)
    run.do(ops.CreateModel(base_model="tiny", lora=ops.LoraShape(rank=4)))
    run.do(cross_entropy(X, Y, Z))
    run.engine.microbatch_tokens = 200
    run.own(microbatch_tokens="200")
    run.do(cross_entropy(X, Y, Z))
    book = run.book()

    assert book.result(1).passes != book.result(2).passes
    assert (await replayed(book)).verdict == "equal"


async def test_other_software_is_a_warning(book, replayed, capsys):
    owned = book.list[0]
    book.replace(owned, environment=owned.environment | {"torch": "1.0"})

    summary = await replayed(book)

    assert summary.verdict == "equal"
    assert summary.warnings[0].startswith("torch: 1.0 in the log, 2.")
    assert "warning: torch: 1.0" in capsys.readouterr().err


async def test_what_any_owner_computed_with_is_looked_at(tiny_llama, replayed):
    run = Recorder(tiny_llama)
    run.do(ops.CreateModel(base_model="tiny", lora=ops.LoraShape(rank=4)))
    run.own(numpy="0.9")
    run.do(cross_entropy(X))
    run.own(torch="0.1")

    (warning,) = (await replayed(run.book())).warnings

    assert warning.startswith("numpy: 0.9 in the log")  # the last one computed nothing


async def test_a_log_without_an_environment_is_replayed_with_a_warning(book, replayed):
    book.replace(book.list[0], environment={})

    summary = await replayed(book)

    assert "base_blake3" in summary.warnings[0]


async def test_other_base_weights_are_refused(book, replayed, tmp_path):
    other = tiny_model.build(tmp_path / "other", seed=1)

    with pytest.raises(ServerError, match="base_blake3: the log was computed on"):
        await replayed(book, other)


async def test_a_base_model_that_is_not_configured_is_refused(book, replayed):
    owned = book.list[0]
    book.replace(owned, environment=owned.environment | {"base_model": "another"})

    with pytest.raises(ConfigError, match="'another' is not configured"):
        await replayed(book)


async def test_parts_that_are_gone_are_no_divergence(book, replayed):
    book.blobs.clear()

    with pytest.raises(BlobMissing):
        await replayed(book)


async def test_a_log_without_ops_is_refused(book, replayed):
    del book.list[1:]

    with pytest.raises(NotFound, match="nothing to replay"):
        await replayed(book)
