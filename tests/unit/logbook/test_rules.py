"""What must hold in a log, told from what may: each rule on its own."""

from __future__ import annotations

import msgspec
import pytest
from blake3 import blake3
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.logbook.made import (
    FAILED,
    LORA,
    MODEL,
    OTHER,
    STEPPED,
    Made,
    a_run,
    forward_backward,
    scored,
    verified,
)

from tinsmith.logbook import DigestMismatch, Entry, LogDamaged
from tinsmith.logbook.rules import Seqs
from tinsmith.logbook.verify import Verification
from tinsmith.messages import ops
from tinsmith.messages.base import BlobRef

STEP = ops.OptimStep()
CREATED = ops.CreateModelDone(model_id=MODEL, lora=LORA)


def begun():
    """A model that was created and has made one step."""
    made = Made().own().op(ops.CreateModel(base_model="tiny"), CREATED, state="s0")
    return made.op(STEP, STEPPED, state="s1")


async def damage(made):
    with pytest.raises(LogDamaged) as caught:
        await verified(made)
    return caught.value.place, caught.value.field


def changed(made, number, **fields):
    """``made`` with entry ``number`` changed, and all links after it made anew."""
    entries = [entry.entry for entry in read(made)]
    entries[number - 1] = msgspec.structs.replace(entries[number - 1], **fields)
    made.data = []
    for entry in entries:
        made.append(entry)
    return made


def read(made):
    return [Entry.read(data, "") for data in made.data]


async def test_a_run_with_something_of_everything_verifies():
    assert len(await verified(a_run())) == 14


async def test_a_verified_log_is_summed_up():
    made = a_run()
    verification = Verification(made, MODEL)
    async for _ in verification.entries():
        pass
    rules = verification.rules

    assert (rules.number, rules.ops, rules.epoch, rules.missing) == (14, 10, 2, 0)
    assert (rules.head, rules.state) == (made.head, "s7")
    assert verification.blobs == {digest: len(data) for digest, data in made.stored.items()}


@pytest.mark.parametrize(
    ("number", "fields", "place", "field"),
    [
        (1, {"model_id": OTHER}, "entry 1 (owner of epoch 1)", "model_id"),
        (1, {"epoch": 2}, "entry 1 (owner of epoch 2)", "epoch"),
        (7, {"epoch": 1}, "entry 7 (owner of epoch 1)", "epoch"),
        (7, {"epoch": 3}, "entry 7 (owner of epoch 3)", "epoch"),
        (8, {"epoch": 1}, "entry 8 (op 4)", "epoch"),
        (8, {"seq": 5}, "entry 8 (op 5)", "op"),
        (3, {"op_blake3": "0" * 64}, "entry 3 (op 1)", "op_blake3"),
        (3, {"result_blake3": "0" * 64}, "entry 3 (op 1)", "result_blake3"),
        (5, {"result_blake3": "0" * 64}, "entry 5 (op 3)", "result_blake3"),
        (3, {"op": None}, "entry 3 (op 1)", "op"),
        (3, {"result_ref": BlobRef("0" * 64, 1)}, "entry 3 (op 1)", "result"),
        (5, {"op_ref": BlobRef("0" * 64, 1)}, "entry 5 (op 3)", "op_ref"),
        (5, {"op_ref": BlobRef("0" * 64, 1 << 40)}, "entry 5 (op 3)", "op_ref"),
        (4, {"state_blake3": ""}, "entry 4 (op 2)", "state_blake3"),
        (3, {"state_blake3": "s9"}, "entry 3 (op 1)", "state_blake3"),
        (6, {"state_blake3": "s9"}, "entry 6 (state after op 2)", "state_blake3"),
        (6, {"seq": 4}, "entry 6 (state after op 4)", "seq"),
        (6, {"parts": {"a": BlobRef("0" * 64, 1)}}, "entry 6 (state after op 2)", "parts['a']"),
    ],
)
async def test_what_does_not_hold_is_named(number, fields, place, field):
    """Links and container are whole: only the meaning is wrong."""
    assert await damage(changed(a_run(), number, **fields)) == (place, field)


async def test_a_changed_entry_breaks_the_link_of_the_next():
    made = a_run()
    made.data[3] = made.data[3].replace(b"s2", b"s3")

    assert await damage(made) == ("entry 5 (op 3)", "prev_blake3")


async def test_a_log_begins_with_an_owner():
    made = Made()
    made.op(STEP, STEPPED, state="s")

    assert await damage(made) == ("entry 1 (op 0)", "epoch")


async def test_an_op_of_another_run_is_found():
    made = begun()
    record = read(made)[1].entry
    other = read(Made(OTHER).own().op(STEP, STEPPED, state="s"))[1].entry
    changed(made, 2, op=other.op, op_blake3=other.op_blake3, result=record.result)

    assert await damage(made) == ("entry 2 (op 0)", "op")


async def test_an_answer_to_another_kind_of_op_is_found():
    made = begun().op(forward_backward(), STEPPED, state="s2")

    assert await damage(made) == ("entry 4 (op 2)", "result")


async def test_inline_bytes_that_are_no_message_are_found():
    made = begun()
    changed(made, 3, op=b"\xc1", op_blake3=blake3(b"\xc1").hexdigest())

    assert await damage(made) == ("entry 3 (op 1)", "op")


async def test_a_wrong_digest_is_an_error_of_its_own():
    with pytest.raises(DigestMismatch):
        await verified(changed(begun(), 3, op_blake3="0" * 64))


async def test_a_blob_of_another_size_than_before_is_found():
    made = begun()
    ref = made.put(b"adapter")
    made.save_state(1, {"a": ref}, state="s1")
    made.save_state(1, {"b": BlobRef(ref.blake3, 99)}, state="s1")

    assert await damage(made) == ("entry 5 (state after op 1)", "parts['b']")


async def test_requests_that_waited_in_vain_may_follow_a_gap():
    """Request 2 never came; the session ended; 3 and 4 were answered as failed."""
    made = begun().op(STEP, FAILED, seq=3).op(STEP, FAILED, seq=4)
    verification = Verification(made, MODEL)
    async for _ in verification.entries():
        pass

    assert verification.rules.missing == 1


async def test_an_op_that_was_carried_out_cannot_follow_a_gap():
    assert await damage(begun().op(STEP, STEPPED, state="s3", seq=3)) == ("entry 4 (op 3)", "seq")


@pytest.mark.parametrize("seq", [-1, 0, 1])
async def test_an_op_happens_once(seq):
    made = begun().op(STEP, FAILED, seq=seq)

    assert await damage(made) == (f"entry 4 (op {seq})", "seq")


async def test_one_that_came_late_is_answered_once():
    made = begun().op(STEP, FAILED, seq=3).op(STEP, FAILED, seq=2)
    assert len(await verified(made)) == 5

    made.op(STEP, FAILED, seq=2)
    assert await damage(made) == ("entry 6 (op 2)", "seq")


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=30))
def test_only_failures_leave_gaps_or_fill_them(arrivals):
    """Against the rule as one would say it."""
    seqs, seen, top = Seqs(), set(), -1
    for seq, is_failed in arrivals:
        is_right = seq == top + 1 or (is_failed and seq not in seen)
        if not is_right:
            with pytest.raises(LogDamaged):
                seqs.add(seq, is_failed=is_failed, place="here")
            continue
        seqs.add(seq, is_failed=is_failed, place="here")
        seen.add(seq)
        top = max(top, seq)
    assert seqs.missing == top + 1 - len(seen)


async def test_huge_seqs_cost_nothing():
    made = begun().op(STEP, FAILED, seq=2**63 - 1)
    verification = Verification(made, MODEL)
    async for _ in verification.entries():
        pass

    assert verification.rules.missing == 2**63 - 3


async def test_every_blob_is_handed_out_once_before_its_entry():
    made, taken = a_run(), []

    async def take(ref):
        taken.append(ref.blake3)

    async for entry in Verification(made, MODEL, take=take).entries():
        if isinstance(entry.entry, ops.StateSaved):
            assert entry.entry.parts["adapter"].blake3 in taken
    assert taken == list(dict.fromkeys(taken))
    assert set(taken) == set(made.stored)


async def test_a_score_that_is_not_a_number_verifies():
    assert await verified(begun().op(forward_backward(), scored(float("nan"))))
