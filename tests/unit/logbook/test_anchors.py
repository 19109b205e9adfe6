"""What was anchored must be in the log: a shorter one, or another, is named with its anchor."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from blake3 import blake3
from tests.unit.logbook.made import (
    MODEL,
    OTHER,
    STEPPED,
    Made,
    a_run,
    packed,
    parts_of_file,
    verified,
    verify_file,
)

from tinsmith.logbook import LogDamaged, transfer
from tinsmith.logbook.anchors import Chain, read_chain
from tinsmith.logbook.container import Kind
from tinsmith.logbook.file import End, FileLogbook
from tinsmith.messages import ops
from tinsmith.messages.anchors import Anchor, Anchored, Head
from tinsmith.messages.base import encode

TIME_NS = 1_764_519_188 * 10**9
WHEN = "2025-11-30T16:13:08+00:00"


def head(made, number, place):
    """Entry ``number`` of ``made`` as an anchor names it."""
    digest = blake3(made.data[number - 1]).hexdigest()
    return Head(model_id=made.model_id, place=place, stream_seq=number, blake3=digest)


def anchored(made, *places):
    """Each of the (number, place) in an anchor of its own."""
    made.anchored = [
        Anchored(number=n, time_ns=TIME_NS, anchor_blake3="a" * 64, head=head(made, *place))
        for n, place in enumerate(places, start=1)
    ]
    return made


def trained(steps, rate=0.1):
    made = Made().own()
    for seq in range(steps):
        made.op(ops.OptimStep(learning_rate=rate if seq >= 4 else 0.1), STEPPED, state=f"s{seq}")
    return made


async def damage(made):
    with pytest.raises(LogDamaged) as raised:
        await verified(made)
    return str(raised.value)


async def test_a_log_with_all_that_was_anchored_verifies():
    await verified(anchored(a_run(), (1, "own.1"), (7, "state.2"), (14, "state.7")))


async def test_a_tail_that_was_cut_off_is_named_with_its_anchor():
    made = trained(8)
    short = trained(6)
    short.anchored = anchored(made, (4, "op.2"), (9, "op.7")).anchored
    told = await damage(short)

    assert told.startswith(f"op 7: anchor: it is not there, but anchor 2 ({WHEN}) has it with ")
    assert made.head in told
    assert "the log ends with entry 7 (op 5), so its end was cut off" in told
    assert f"what anchor 1 ({WHEN}) has is there" in told


async def test_a_log_that_was_written_anew_is_named_where_it_was_anchored():
    other = trained(8, rate=0.2)
    other.anchored = anchored(trained(8), (4, "op.2"), (7, "op.5"), (9, "op.7")).anchored
    told = await damage(other)

    assert told.startswith("entry 7 (op 5): anchor: its digest is ")
    assert f"anchor 2 ({WHEN}) has it with the digest" in told


async def test_a_log_that_is_gone_is_named_with_its_anchor():
    gone = Made()
    gone.anchored = anchored(trained(2), (3, "op.1")).anchored

    assert "op 1: anchor: it is not there" in await damage(gone)
    assert "the log is empty" in await damage(gone)


@pytest.mark.parametrize("cut", [1, 5, 13])
async def test_whatever_is_cut_off_behind_an_anchor_is_found(cut):
    made = anchored(a_run(), (14, "state.7"))
    made.data = made.data[:-cut]

    assert "state after op 7: anchor: " in await damage(made) or "entry" in await damage(made)


async def exported(made, path, **options):
    await transfer.export(made, MODEL, path, overwrite=True, on_entry=lambda: None, **options)
    return path


async def test_an_exported_file_carries_its_anchors(tmp_path):
    made = anchored(a_run(), (5, "op.3"), (14, "state.7"))
    path = await exported(made, tmp_path / "a.tslog")
    with FileLogbook.open(path) as book:
        assert list((await book.anchors()).of(MODEL)) == made.anchored
        again = await exported(book, tmp_path / "b.tslog")

    assert again.read_bytes() == path.read_bytes()


def test_a_file_whose_tail_was_cut_off_and_its_end_written_anew_is_found(tmp_path):
    """All of the file's own checks hold; only what was told elsewhere does not."""
    cover, *parts, (_, end) = parts_of_file(trained(6))
    told = encode(tuple(anchored(trained(8), (9, "op.7")).anchored))
    end = encode(msgspec.structs.replace(msgspec.msgpack.decode(end, type=End), anchors=1))
    path = tmp_path / "a.tslog"
    path.write_bytes(packed([cover, (Kind.ANCHORS, told), *parts, (Kind.END, end)]))

    with pytest.raises(LogDamaged, match="op 7: anchor: it is not there"):
        verify_file(path)


def test_anchors_that_were_taken_out_of_a_file_are_missed(tmp_path):
    *parts, (_, end) = parts_of_file(trained(6))
    end = encode(msgspec.structs.replace(msgspec.msgpack.decode(end, type=End), anchors=1))
    path = tmp_path / "a.tslog"
    path.write_bytes(packed([*parts, (Kind.END, end)]))

    with pytest.raises(LogDamaged, match="anchors: the file's end says 1, but it has 0"):
        verify_file(path)


def test_anchors_of_another_run_are_no_part_of_a_file(tmp_path):
    cover, *parts = parts_of_file(trained(6))
    told = encode(tuple(anchored(Made(OTHER).own(), (1, "own.1")).anchored))
    path = tmp_path / "a.tslog"
    path.write_bytes(packed([cover, (Kind.ANCHORS, told), *parts]))

    with pytest.raises(LogDamaged, match=f"the anchors: model_id: '{OTHER}'"):
        verify_file(path)


def chain_of(*stretches):
    """Anchors as (subject, bytes), each of one entry of a run, chained."""
    found, previous = [], "0" * 64
    for number, (after, through, model) in enumerate(stretches, start=1):
        entry = Head(model_id=model, place="op.1", stream_seq=through, blake3="b" * 64)
        anchor = Anchor(
            number=number, time_ns=TIME_NS, after=after, through=through, heads=(entry,),
            prev_blake3=previous,
        )  # fmt: skip
        data = encode(anchor)
        previous = blake3(data).hexdigest()
        found.append((f"tinsmith.v1.anchor.{number}", data))
    return found


GOOD = chain_of((0, 5, MODEL), (5, 9, OTHER), (9, 12, MODEL))


async def chain(stored):
    async def one_by_one():
        for item in stored:
            yield item

    return await read_chain(one_by_one())


async def test_a_chain_is_read_by_run():
    found = await chain(GOOD)

    assert found.damage is None
    assert (found.length, found.blake3) == (3, blake3(GOOD[-1][1]).hexdigest())
    assert [one.number for one in found.of(MODEL)] == [1, 3]
    assert found.of("c" * 26 + ":train:0") == ()


def changed(index, **changes):
    subject, data = GOOD[index]
    anchor = msgspec.structs.replace(msgspec.msgpack.decode(data, type=Anchor), **changes)
    return [*GOOD[:index], (subject, encode(anchor)), *GOOD[index + 1 :]]


@pytest.mark.parametrize(
    ("stored", "problem"),
    [
        (changed(0, heads=()), "anchor 2: prev_blake3: "),
        (GOOD[1:], "anchor 1: number: "),
        ([GOOD[0], GOOD[2]], "anchor 2: number: 3 is stored as"),
        ([GOOD[1], GOOD[0]], "anchor 1: number: "),
        (changed(1, after=7), "anchor 2: after: 7 is not where the anchor before ended, 5"),
        (changed(2, number=4), "anchor 3: number: "),
        ([GOOD[0], (GOOD[1][0], b"\xc1")], "anchor 2: anchor: not one that can be read"),
        ([*GOOD[:2], ("tinsmith.v1.anchor.9", GOOD[2][1])], "anchor 3: number: "),
    ],
)
async def test_the_first_anchor_that_cannot_be_the_next_is_named(stored, problem):
    found = await chain(stored)

    assert str(found.damage).startswith(problem)


async def test_what_was_anchored_before_the_damage_is_still_expected():
    found = await chain(changed(1, after=7))

    assert [one.number for one in found.of(MODEL)] == [1]
    assert replace(found, damage=None) == Chain(
        heads=found.heads, length=1, through=5, blake3=blake3(GOOD[0][1]).hexdigest()
    )
