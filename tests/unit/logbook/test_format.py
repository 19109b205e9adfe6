"""The file format as docs/audit.md has it: files that exist must stay readable."""

from __future__ import annotations

import struct
from pathlib import Path

import msgspec
from blake3 import blake3
from tests.unit.logbook.made import MODEL, a_run, verified

from tinsmith.logbook.compare import Side, compare
from tinsmith.logbook.container import zstd
from tinsmith.logbook.file import FileLogbook

RECORDED = Path(__file__).with_name("recorded-1.tslog")
DOCS = Path(__file__).parents[3] / "docs" / "audit.md"


def parts(data):
    """(kind, bytes) of every part, read by the documented layout and nothing of ours."""
    found, at = [], 0
    while at < len(data):
        magic, size, tag, version, kind, zero, raw_size, packed_size = struct.unpack_from(
            "<II4sBBHQQ", data, at
        )
        assert (magic, size, tag, version, zero) == (0x184D2A54, 72, b"TSLG", 1, 0)
        frame = data[at + 80 : at + 80 + packed_size]
        raw = zstd.decompress(frame)
        assert len(raw) == raw_size
        assert data[at + 32 : at + 64] == blake3(raw).digest()
        assert data[at + 64 : at + 72] == blake3(frame).digest(8)
        assert data[at + 72 : at + 80] == blake3(data[at + 8 : at + 72]).digest(8)
        found.append((kind, raw))
        at += 80 + packed_size
    return found


async def test_a_file_of_format_1_verifies_and_says_what_it_always_said():
    with FileLogbook.open(RECORDED) as book:
        entries = await verified(book)
        found = await compare(Side(book, MODEL), Side(a_run(), MODEL), on_op=lambda: None)

    assert (len(entries), found.equal_ops, found.difference) == (14, 10, None)


def test_the_documented_layout_is_the_real_one():
    found = parts(RECORDED.read_bytes())
    cover, end = (msgspec.msgpack.decode(found[index][1]) for index in (0, -1))

    assert [kind for kind, _ in found] == [
        1,
        2,
        2,
        2,
        2,
        3,
        3,
        2,
        3,
        2,
        2,
        2,
        2,
        2,
        3,
        2,
        2,
        2,
        3,
        2,
        4,
    ]
    assert cover == {"model_id": MODEL, "tinsmith": "0"}
    assert end == {"entries": 14, "blobs": 5, "head_blake3": blake3(found[-2][1]).hexdigest()}


def test_the_page_names_every_field_that_is_checked():
    page = DOCS.read_text()
    for field in ("prev_blake3", "model_id", "epoch", "seq", "op_blake3", "result_blake3",
                  "state_blake3", "op_ref", "result_ref", "parts[...]", "subject"):  # fmt: skip
        assert f"`{field}`" in page
