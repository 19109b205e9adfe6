"""An exported log: what was written is read, and damage is found where it is."""

from __future__ import annotations

import asyncio

import pytest
from blake3 import blake3
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.unit.logbook.made import (
    MODEL,
    OTHER,
    a_run,
    packed,
    parts_of_file,
    verified,
    verify_file,
)

from tinsmith.errors import BlobMissing, InvalidRequest, NotFound
from tinsmith.logbook import Entry, LogDamaged, transfer
from tinsmith.logbook.container import HEADER, LIMITS, Kind, pack_part, zstd
from tinsmith.logbook.file import Cover, End, FileLogbook
from tinsmith.messages.base import GENESIS, BlobRef, encode

RUN = a_run()
PARTS = parts_of_file(RUN)
FILE = packed(PARTS)
ENDS = [  # kind of each part, and where it ends
    (kind, len(packed(PARTS[: index + 1]))) for index, (kind, _) in enumerate(PARTS)
]
NAMES = [  # of the run's entries, in order
    "owner of epoch 1", "op 0", "op 1", "op 2", "op 3", "state after op 2", "owner of epoch 2",
    "op 4", "op 5", "op 6", "op 7", "op 8", "op 9", "state after op 7",
]  # fmt: skip


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("files") / "run.tslog"


def end(entries=len(NAMES), blobs=len(RUN.stored), head=RUN.head):  # noqa: B008 - they are fixed
    return Kind.END, encode(End(entries=entries, blobs=blobs, head_blake3=head))


def cover(model_id):
    return encode(Cover(model_id=model_id, tinsmith="0"))


def reheaded(fields):
    """A header with these fields, whose own check holds."""
    header = HEADER.pack(*fields)[:-8]
    return pack_part(Kind.BLOB, b"")[0][:8] + header + blake3(header).digest(8)


def write(path, data):
    path.write_bytes(data)
    return path


def entry(number):
    return f"entry {number} ({NAMES[number - 1]})"


def after(number):
    return f"after {entry(number) if number else 'the cover'}"


def entries_before(index):
    return sum(kind is Kind.ENTRY for kind, _ in PARTS[:index])


def place_of_byte(offset):
    """What damage at this byte of ``FILE`` is attributed to."""
    index = next(i for i, (_, end) in enumerate(ENDS) if offset < end)
    kind, before = PARTS[index][0], entries_before(index)
    start = ENDS[index - 1][1] if index else 0
    if kind is Kind.COVER:
        return "the cover"
    if kind is Kind.END or offset < start + HEADER.size + 8:
        return after(before)
    if kind is Kind.BLOB:
        return entry(before + 1)
    seqs = [name.removeprefix("op ") for name in NAMES[:before] if name.startswith("op ")]
    return f"entry {before + 1} ({f'after op {seqs[-1]}' if seqs else 'before any op'})"


async def export(path, run=RUN, *, overwrite=False):
    return await transfer.export(
        run, run.model_id, path, overwrite=overwrite, on_entry=lambda: None
    )


async def test_an_export_has_every_entry_and_blob_byte_for_byte(tmp_path):
    await export(tmp_path / "a.tslog")
    with FileLogbook.open(tmp_path / "a.tslog") as book:
        entries = await verified(book)
        blobs = [await book.blob(BlobRef(d, len(b))) for d, b in RUN.stored.items()]

    assert [e.data for e in entries] == RUN.data
    assert blobs == list(RUN.stored.values())


async def test_two_exports_of_one_log_are_the_same_file(tmp_path):
    for name in ("a", "b"):
        await export(tmp_path / name)

    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_an_export_is_an_ordinary_zstd_file():
    assert zstd.decompress(FILE) == b"".join(data for _, data in PARTS)


@given(st.integers(0, len(FILE) * 8 - 1))
@settings(max_examples=300, deadline=None)
def test_a_flipped_bit_anywhere_is_found_where_it_is(place, bit):
    offset = bit // 8
    damaged = bytearray(FILE)
    damaged[offset] ^= 1 << bit % 8
    with pytest.raises(LogDamaged) as caught:
        verify_file(write(place, damaged))

    assert caught.value.place == place_of_byte(offset)


@given(st.integers(0, len(FILE) - 1))
@settings(max_examples=200, deadline=None)
def test_a_file_cut_off_anywhere_ends_after_its_last_whole_entry(place, size):
    with pytest.raises(LogDamaged) as caught:
        verify_file(write(place, FILE[:size]))

    whole = [kind for kind, end in ENDS if end <= size]
    assert caught.value.place == (after(whole.count(Kind.ENTRY)) if whole else "the cover")


@given(st.integers(1, len(NAMES)))
def test_a_removed_entry_is_missed_by_the_next_one(place, number):
    without = [part for part in PARTS if part != (Kind.ENTRY, RUN.data[number - 1])]
    with pytest.raises(LogDamaged) as caught:
        verify_file(write(place, packed(without)))

    if number < len(NAMES):
        assert caught.value.place == f"entry {number} ({NAMES[number]})"
        assert caught.value.field == "prev_blake3"
    else:
        assert caught.value.place == after(number - 1)


@given(st.sets(st.integers(1, len(NAMES)), min_size=2, max_size=2).map(sorted))
def test_of_swapped_entries_the_first_is_found(place, numbers):
    first, second = (PARTS.index((Kind.ENTRY, RUN.data[number - 1])) for number in numbers)
    swapped = list(PARTS)
    swapped[first], swapped[second] = swapped[second], swapped[first]
    with pytest.raises(LogDamaged) as caught:
        verify_file(write(place, packed(swapped)))

    assert caught.value.place == f"entry {numbers[0]} ({NAMES[numbers[1] - 1]})"
    assert caught.value.field == "prev_blake3"


@given(st.integers(1, len(NAMES)))
def test_an_entry_that_is_there_twice_is_found(place, number):
    index = PARTS.index((Kind.ENTRY, RUN.data[number - 1]))
    doubled = [*PARTS[: index + 1], PARTS[index], *PARTS[index + 1 :]]
    with pytest.raises(LogDamaged) as caught:
        verify_file(write(place, packed(doubled)))

    assert caught.value.place == f"entry {number + 1} ({NAMES[number - 1]})"


@pytest.mark.parametrize("number", range(sum(kind is Kind.BLOB for kind, _ in PARTS)))
def test_a_removed_blob_is_missed_by_the_entry_that_needs_it(place, number):
    index = [i for i, (kind, _) in enumerate(PARTS) if kind is Kind.BLOB][number]
    with pytest.raises(LogDamaged, match="is not in the file") as caught:
        verify_file(write(place, packed(PARTS[:index] + PARTS[index + 1 :])))

    assert caught.value.place == entry(entries_before(index) + 1)
    assert caught.value.field in ("op_ref", "result_ref", "parts['adapter']")


def test_a_blob_that_no_entry_refers_to_is_found(place):
    smuggled = [*PARTS[:3], (Kind.BLOB, b"hidden"), *PARTS[3:-1], end(blobs=len(RUN.stored) + 1)]

    with pytest.raises(LogDamaged, match="no entry refers to it"):
        verify_file(write(place, packed(smuggled)))


@pytest.mark.parametrize(
    ("parts", "problem"),
    [
        ([*PARTS, PARTS[-1]], "more follows the end"),
        ([PARTS[0], *PARTS], "not the only cover"),
        (PARTS[1:], "not the first part"),
        (PARTS[:-1], "ends without one"),
        ([PARTS[0], end(0, 0, GENESIS)], "it has none"),
        ([*PARTS[:2], (Kind.BLOB, b"x"), (Kind.BLOB, b"x"), *PARTS[2:]], "there twice"),
        ([(Kind.COVER, cover("../../etc")), *PARTS[1:]], "model_id"),
        ([(Kind.COVER, cover(OTHER)), *PARTS[1:]], "model_id"),
        ([(Kind.COVER, b"\xc1"), *PARTS[1:]], "the cover"),
    ],
)
def test_parts_that_do_not_make_a_file_are_refused(place, parts, problem):
    with pytest.raises(LogDamaged, match=problem):
        verify_file(write(place, packed(parts)))


def test_a_cut_tail_is_unseen_when_the_end_is_rewritten_to_fit(place):
    """Why the digest of a log's last entry should be kept elsewhere."""
    shorter = [*PARTS[:3], end(2, 0, head=Entry.read(RUN.data[1], "").blake3)]

    assert len(verify_file(write(place, packed(shorter)))) == 2


@given(st.binary(max_size=400), st.booleans())
def test_bytes_of_any_kind_are_damage_and_nothing_else(place, data, is_after_header):
    with pytest.raises(LogDamaged):
        verify_file(write(place, FILE[: HEADER.size + 8] * is_after_header + data))


@given(st.integers(0, len(PARTS) - 1), st.data())
@settings(max_examples=300)
def test_parts_of_any_content_are_damage_or_harmless(place, index, data):
    """What someone makes who knows the format: every check of the file itself holds."""
    kind, raw = PARTS[index]
    at = data.draw(st.integers(0, len(raw) - 1))
    changed = raw[:at] + data.draw(st.binary(max_size=9)) + raw[at + data.draw(st.integers(0, 9)) :]
    try:
        verify_file(write(place, packed([*PARTS[:index], (kind, changed), *PARTS[index + 1 :]])))
    except LogDamaged:
        return
    assert changed == raw or kind is Kind.COVER  # whose version is only told


def test_a_part_that_unpacks_to_more_than_it_says_is_refused_before_it_is_kept(place):
    header, frame = pack_part(Kind.BLOB, bytes(8 << 20))
    fields = list(HEADER.unpack(header[8:]))
    fields[3] = 5
    bomb = reheaded(fields)
    path = write(place, packed(PARTS[:3]) + bomb + frame)
    with FileLogbook.open(path) as book, pytest.raises(BlobMissing, match="more than the 5 bytes"):
        asyncio.run(book.blob(BlobRef(fields[5].hex(), 5)))


def test_a_size_over_the_limit_is_refused_unread(place):
    fields = list(HEADER.unpack(pack_part(Kind.ENTRY, b"")[0][8:]))
    fields[3] = LIMITS[Kind.ENTRY] + 1
    with pytest.raises(LogDamaged, match="over the format's limit"):
        verify_file(write(place, packed(PARTS[:1]) + reheaded(fields) + b"x"))


def test_a_newer_format_is_named(place):
    fields = list(HEADER.unpack(pack_part(Kind.COVER, b"")[0][8:]))
    fields[1] = 2
    with pytest.raises(LogDamaged, match="newer version of Tinsmith"):
        verify_file(write(place, reheaded(fields)))


async def test_a_blob_is_found_by_its_exact_name_only(place):
    digest, data = next(iter(RUN.stored.items()))
    with FileLogbook.open(write(place, FILE)) as book:
        for name, size in ((digest.upper(), len(data)), (digest, len(data) + 1), ("../x", 1)):
            with pytest.raises(BlobMissing):
                await book.blob(BlobRef(name, size))


async def test_a_file_has_its_one_run_and_no_other(place):
    with FileLogbook.open(write(place, FILE)) as book:
        assert (await book.runs(), await book.length(MODEL)) == ([MODEL], len(NAMES))
        with pytest.raises(NotFound, match=MODEL):
            await book.length(OTHER)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(NotFound, match=r"none\.tslog"), FileLogbook.open(tmp_path / "none.tslog"):
        pass


def test_a_folder_is_no_log(tmp_path):
    with pytest.raises(InvalidRequest, match="not a file"), FileLogbook.open(tmp_path):
        pass
