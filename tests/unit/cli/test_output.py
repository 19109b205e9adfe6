from __future__ import annotations

import io
import json
import os

from tinsmith.cli import output


def stream(**options):
    options = {"is_json": False, "has_colors": False} | options
    text = io.StringIO()
    return text, output.LogStream(text, ["up", "gateway"], **options)


async def read(*chunks):
    reader, writer = os.pipe()
    for chunk in chunks:
        os.write(writer, chunk)
    os.close(writer)
    return [line async for line in output.lines(reader)]


def test_every_line_says_which_process_wrote_it_in_columns():
    text, log = stream()
    log.write("up", "a")
    log.write("gateway", "b")

    assert text.getvalue() == "up      | a\ngateway | b\n"


def test_processes_have_different_colours():
    text, log = stream(has_colors=True)
    log.write("up", "a")
    log.write("gateway", "b")

    first, second = text.getvalue().splitlines()
    assert first.startswith("\x1b[36mup")
    assert second.startswith("\x1b[32mgateway")


def test_json_lines_pass_and_other_lines_become_json():
    text, log = stream(is_json=True)
    log.write("gateway", '{"event": "a"}')
    log.write("gateway", "b")

    passed, made = map(json.loads, text.getvalue().splitlines())
    assert passed == {"event": "a"}
    assert made == {"service": "gateway", "event": "b"}


async def test_lines_arrive_whole_and_the_last_needs_no_newline():
    assert await read(b"on", b"e\n\ntw", b"o") == ["one", "", "two"]


async def test_bytes_that_are_no_text_do_not_stop_the_stream():
    assert await read(b"\xff\nafter\n") == ["�", "after"]


async def test_an_endless_line_is_broken_in_pieces(monkeypatch):
    monkeypatch.setattr(output, "MAX_LINE_BYTES", 10)

    pieces = await read(b"x" * 25 + b"\nafter\n")

    assert "".join(pieces) == "x" * 25 + "after"
