from __future__ import annotations

import io
import json
import logging
import threading

import pytest
import structlog

from tinsmith import logs
from tinsmith.config import LogsConfig


@pytest.fixture
def stream():
    return io.StringIO()


def configured(stream, **config):
    config.setdefault("format", "json")
    logs.configure(LogsConfig(**config), service="gateway", instance="gateway-1", stream=stream)
    return structlog.get_logger("test")


def lines(stream):
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_line_is_one_json_object_that_says_who_wrote_it(stream):
    configured(stream).info("ready", port=8400)

    (line,) = lines(stream)
    assert line["event"] == "ready"
    assert line["port"] == 8400
    assert (line["service"], line["instance"]) == ("gateway", "gateway-1")


def test_bound_context_is_on_every_line_of_a_task(stream):
    log = configured(stream)
    with structlog.contextvars.bound_contextvars(model_id="m", seq=3):
        log.info("one")
    log.info("two")

    assert [line.get("model_id") for line in lines(stream)] == ["m", None]


def test_a_thread_without_context_still_names_the_service(stream):
    log = configured(stream)
    thread = threading.Thread(target=log.info, args=("computed",))
    thread.start()
    thread.join()

    assert lines(stream)[0]["service"] == "gateway"


def test_stdlib_logging_goes_the_same_way(stream):
    configured(stream)
    logging.getLogger("library").warning("slow: %s", "disk")

    (line,) = lines(stream)
    assert (line["event"], line["level"], line["service"]) == ("slow: disk", "warning", "gateway")


def test_lines_below_the_level_are_not_written(stream):
    log = configured(stream, level="warning")
    log.info("no")
    logging.getLogger("library").info("no")
    log.warning("yes")

    assert [line["event"] for line in lines(stream)] == ["yes"]


@pytest.mark.parametrize(
    "fields",
    [
        {"api_key": "anything"},
        {"X-API-Key": "anything"},
        {"headers": {"x-api-key": "anything", "accept": "fine"}},
        {"password": "anything"},
        {"text": "key tml-anything refused"},
        {"items": ["tml-anything"]},
        {"url": "nats://user:anything@host:4222"},
        {"url": "nats://anything@host:4222"},
        {"jwt": "eyJhbGciOiJI.eyJhbnl0aGluZyI6.anything"},
        {"error": ValueError("tml-anything")},
        {"raw": "X-API-Key: anything"},
    ],
)
@pytest.mark.parametrize("form", ["json", "console"])
def test_secrets_are_redacted_wherever_they_stand(fields, form, stream):
    configured(stream, format=form).warning("refused", **fields)

    assert "refused" in stream.getvalue()
    assert "anything" not in stream.getvalue()


def test_secrets_in_a_traceback_are_redacted(stream):
    log = configured(stream)
    try:
        raise ValueError("tml-anything is wrong")  # noqa: TRY301
    except ValueError:
        log.exception("failed")

    assert "ValueError" in stream.getvalue()
    assert "anything" not in stream.getvalue()


def test_values_that_are_no_secrets_are_kept(stream):
    configured(stream).info("step", tokens=12, url="http://127.0.0.1:8400/a", ok=True, note=None)

    (line,) = lines(stream)
    assert (line["tokens"], line["url"], line["ok"], line["note"]) == (
        12,
        "http://127.0.0.1:8400/a",
        True,
        None,
    )


def test_the_console_form_is_one_readable_line_without_the_identity(stream):
    configured(stream, format="console").info("ready", port=8400)

    assert "ready" in stream.getvalue()
    assert "port=8400" in stream.getvalue()
    assert "gateway-1" not in stream.getvalue()


@pytest.mark.parametrize(
    ("environ", "expected"),
    [({}, False), ({"FORCE_COLOR": "1"}, True), ({"FORCE_COLOR": "1", "NO_COLOR": "1"}, False)],
)
def test_colour_follows_the_usual_variables(environ, expected):
    assert logs.has_colors(io.StringIO(), environ) is expected


def test_a_reported_error_is_one_line_without_secrets(capsys):
    logs.report("up", ValueError("two\nlines at nats://secret@host"))

    assert capsys.readouterr().err == "tinsmith up: error: two lines at nats://***@host\n"


def test_a_signed_link_loses_what_opens_it():
    said = logs.redact_text("GET /api/v1/downloads/WyJhcmNoaXZlIl0.c2ln_-x/kept.tar failed")
    assert said == "GET /api/v1/downloads/***/kept.tar failed"
