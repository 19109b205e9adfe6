"""Logs whose contents are sealed: with their key, and when it is gone or elsewhere."""

from __future__ import annotations

import asyncio

import msgspec
import pytest
from tests.unit.logbook.made import MODEL, STEPPED, Made, a_run, verified

from tinsmith.errors import Forgotten, SealBroken
from tinsmith.logbook import DigestMismatch, LogDamaged, lines, op_of, transfer
from tinsmith.logbook.compare import Side, compare
from tinsmith.logbook.file import FileLogbook
from tinsmith.logbook.overview import overview
from tinsmith.logbook.verify import Verification
from tinsmith.messages import ops
from tinsmith.messages.registry import ForgottenRun
from tinsmith.sealing import PLAIN, ClosedSeal, KeySeal

KEY = bytes(range(32))
GONE = ClosedSeal.of(
    ForgottenRun(model_id=MODEL, forgotten_ns=1_764_500_000_000_000_000, reason="asked to")
)
DAY = "2025-11-30 10:53:20 UTC"


def sealed_run():
    return a_run(seal=KeySeal(KEY))


def closed_by(made, seal):
    made.opened_with = seal
    return made


async def records(book):
    return [e.entry async for e in book.entries(MODEL) if isinstance(e.entry, ops.Record)]


async def pass_over(book):
    verification = Verification(book, MODEL)
    async for _ in verification.entries():
        pass
    return verification


@pytest.fixture
def write(tmp_path):
    """An export of ``made``, opened."""
    opened = []

    async def export(made, name="run.tslog", **options):
        path = tmp_path / name
        await transfer.export(made, MODEL, path, overwrite=False, on_entry=lambda: None, **options)
        context = FileLogbook.open(path)
        opened.append(context)
        return context.__enter__()

    yield export
    for context in opened:
        context.__exit__(None, None, None)


async def test_a_sealed_log_verifies_with_its_key():
    assert len(await verified(sealed_run())) == len(sealed_run().data)


async def test_no_entry_of_a_sealed_log_says_what_it_holds():
    assert not any(b"tiny/llama" in data or b"grad_norm" in data for data in sealed_run().data)


async def test_a_forgotten_log_still_verifies_and_says_so():
    verification = await pass_over(closed_by(sealed_run(), GONE))

    assert f"forgotten on {DAY} (asked to)" in str(verification.why_closed)
    assert (verification.rules.ops, verification.rules.state) == (10, "s7")


async def test_a_forgotten_log_shows_what_is_left():
    told = [t async for t in lines.facts(closed_by(sealed_run(), GONE), MODEL)]

    assert {t["kind"] for t in told} == {"owned", "state_saved", "sealed"}
    assert told[1]["details"] == {"contents": "forgotten"}
    assert told[1]["state_blake3"] == "s0"


@pytest.mark.parametrize(
    ("seal", "error"), [(GONE, Forgotten), (PLAIN, SealBroken)], ids=["forgotten", "no key"]
)
async def test_what_needs_the_contents_says_why_there_are_none(seal, error):
    made = closed_by(sealed_run(), seal)

    with pytest.raises(error):
        await op_of(made, (await records(made))[0])
    with pytest.raises(error):
        await compare(Side(made, MODEL), Side(made, MODEL), on_op=lambda: None)


async def test_a_bit_of_a_sealed_payload_is_covered_by_the_chain():
    made = closed_by(sealed_run(), GONE)
    made.data[3] = made.data[3][:-40] + bytes([made.data[3][-40] ^ 1]) + made.data[3][-39:]

    with pytest.raises(LogDamaged):
        await verified(made)


async def test_a_sealed_blob_that_is_missing_is_found_without_the_key():
    made = closed_by(sealed_run(), GONE)
    record = next(r for r in await records(made) if r.op_ref)
    del made.stored[record.op_ref.blake3]

    with pytest.raises(LogDamaged, match="op_ref"):
        await verified(made)


async def test_a_payload_that_only_claims_to_be_sealed_is_found_without_the_key():
    made = Made().own()
    made.op(ops.OptimStep(), STEPPED, state="s0")
    record = msgspec.msgpack.decode(made.data.pop(), type=ops.Record)
    made.append(msgspec.structs.replace(record, sealed="v1"))

    with pytest.raises(LogDamaged, match="not"):
        await verified(closed_by(made, GONE))


async def test_a_payload_under_another_key_is_a_wrong_digest():
    made = closed_by(sealed_run(), KeySeal(KeySeal.new_key()))

    with pytest.raises(DigestMismatch, match="another key"):
        await verified(made)


async def test_records_of_a_newer_scheme_say_so():
    made = sealed_run()
    record = msgspec.structs.replace((await records(made))[0], sealed="v2")

    with pytest.raises(SealBroken, match="newer version"):
        await op_of(made, record)


async def test_plain_records_are_read_whatever_the_seal_of_their_run():
    made = closed_by(a_run(), GONE)

    assert len(await verified(made)) == len(made.data)


async def test_a_record_of_before_sealing_is_a_plain_one():
    old = msgspec.msgpack.decode(a_run().data[1])
    del old["sealed"]

    assert msgspec.msgpack.decode(msgspec.msgpack.encode(old), type=ops.Record).sealed == ""


async def test_an_exported_file_is_readable_by_itself(write):
    book = await write(sealed_run())

    assert (await pass_over(book)).why_closed is None
    assert (await op_of(book, (await records(book))[0])).body.base_model == "tiny/llama"


async def test_an_export_without_the_key_is_verified_but_not_read(write):
    book = await write(sealed_run(), has_key=False)

    assert "exported without their key" in str((await pass_over(book)).why_closed)
    with pytest.raises(SealBroken, match="--sealed"):
        await op_of(book, (await records(book))[0])


async def test_an_export_without_the_key_keeps_the_blobs_that_only_contents_name(write):
    with_key, without = (
        await write(sealed_run(), "a"),
        await write(sealed_run(), "b", has_key=False),
    )

    assert len((await pass_over(with_key)).blobs) == len(without._index.blobs)


async def test_an_export_of_a_forgotten_run_remembers_when(write):
    book = await write(closed_by(sealed_run(), GONE))

    assert DAY in str((await pass_over(book)).why_closed)


async def test_a_damaged_key_in_a_file_is_named(write, tmp_path):
    from tinsmith.logbook.container import Kind, pack_part
    from tinsmith.logbook.file import Cover
    from tinsmith.messages.base import encode

    cover = Cover(model_id=MODEL, tinsmith="0", data_key=b"short")
    (tmp_path / "x.tslog").write_bytes(b"".join(pack_part(Kind.COVER, encode(cover))))

    with pytest.raises(LogDamaged, match="data_key"), FileLogbook.open(tmp_path / "x.tslog"):
        pass


def test_ls_says_that_the_contents_are_gone():
    row = asyncio.run(overview(closed_by(sealed_run(), GONE), MODEL))

    assert row.closed == "forgotten"
