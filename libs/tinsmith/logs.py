"""Logging: one structured stream on standard error, for structlog and stdlib alike.

What every line of a task should carry (``request_id``, ``model_id``, ``seq``) is bound with
``structlog.contextvars.bind_contextvars``; ``service`` and ``instance`` are on every line of the
process, those of threads included.
"""

from __future__ import annotations

import logging
import os
import re
import sys
from typing import TYPE_CHECKING, TextIO

import msgspec
import structlog

if TYPE_CHECKING:
    from collections.abc import Mapping

    from structlog.typing import EventDict, Processor, WrappedLogger

    from tinsmith.config import LogsConfig

REDACTED = "***"
ERROR_PREFIX = "tinsmith"
_SECRET_KEYS = re.compile(
    r"x[-_]api[-_]key|authorization|(.*_)?(api_keys?|password|token|secret(_access_key)?)",
    re.IGNORECASE,
)
# API keys, JWTs, what stands before the host in a URL, signed links.
_SECRET_TEXT = re.compile(
    r"tml-[A-Za-z0-9_\-]+|eyJ[\w-]{8,}\.[\w-]+\.[\w-]*|(?<=://)[^/@\s]+(?=@)"
    r"|(?i:(?<=x-api-key: )\S+)"
    r"|(?<=/api/v1/downloads/)[^/\s]+"  # opens what it names to whoever has it
)
# Libraries that say at info level what is only interesting when they fail.
_CHATTY = ("aiohttp.access", "httpx", "httpcore", "urllib3", "filelock", "asyncio")


def configure(
    config: LogsConfig, *, service: str, instance: str, stream: TextIO | None = None
) -> None:
    """Routes structlog and stdlib logging to ``stream`` (standard error), as configured."""
    stream = stream or sys.stderr
    is_console = is_for_people(config, stream)
    shared = _shared(_Identity(service, instance), is_console=is_console)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,  # module-level loggers must follow a later configure()
    )
    renderers = _console(stream) if is_console else [_json()]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared, processors=[*_BEFORE_RENDERING, redact, *renderers]
        )
    )
    _route_stdlib(handler, config.level.upper())


def is_for_people(config: LogsConfig, stream: TextIO) -> bool:
    """Whether lines on ``stream`` are to be read by people; else they are JSON."""
    return config.format == "console" or (config.format == "auto" and stream.isatty())


def _shared(identity: Processor, *, is_console: bool) -> list[Processor]:
    """What is done to the lines of structlog and of stdlib logging alike."""
    return [
        structlog.contextvars.merge_contextvars,
        identity,
        structlog.stdlib.add_log_level,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.processors.TimeStamper("%H:%M:%S" if is_console else "iso", utc=not is_console),
        structlog.processors.StackInfoRenderer(),
    ]


_BEFORE_RENDERING: tuple[Processor, ...] = (
    structlog.stdlib.ProcessorFormatter.remove_processors_meta,
    # Before redaction: a key can stand in a traceback's message too.
    structlog.processors.format_exc_info,
)


def report(command: str, error: Exception) -> None:
    """The one line on standard error that an operator sees when ``command`` cannot go on."""
    line = " ".join(str(error).split())
    sys.stderr.write(f"{ERROR_PREFIX} {command}: error: {redact_text(line)}\n")
    sys.stderr.flush()


def _route_stdlib(handler: logging.Handler, level: str) -> None:
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
    for name in _CHATTY:
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    # It warns of each TLS connection that the other side ends.
    logging.getLogger("asyncio").setLevel(logging.ERROR)
    logging.captureWarnings(capture=True)


class _Identity:
    """A processor rather than context variables, which threads of an executor do not have."""

    def __init__(self, service: str, instance: str) -> None:
        self._service = service
        self._instance = instance

    def __call__(self, _logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event.setdefault("service", self._service)
        event.setdefault("instance", self._instance)
        return event


def has_colors(stream: TextIO, environ: Mapping[str, str] = os.environ) -> bool:
    """Whether to colour: NO_COLOR and FORCE_COLOR decide, else a terminal does."""
    if environ.get("NO_COLOR"):
        return False
    return bool(environ.get("FORCE_COLOR")) or stream.isatty()


def _json() -> Processor:
    return structlog.processors.JSONRenderer(serializer=_to_json)


def _console(stream: TextIO) -> list[Processor]:
    return [
        _drop_identity,
        structlog.dev.ConsoleRenderer(
            colors=has_colors(stream),
            exception_formatter=structlog.dev.plain_traceback,
            pad_event_to=0,
        ),
    ]


def _drop_identity(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    # For human eyes: the terminal, or the prefix that `tinsmith up` adds, says it already.
    event.pop("service", None)
    event.pop("instance", None)
    return event


def _to_json(event: EventDict, **_: object) -> str:
    return msgspec.json.encode(event, enc_hook=repr).decode()


def redact(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Replaces keys, tokens and passwords wherever they stand in a line."""
    return {key: _clean(key, value) for key, value in event.items()}


def _clean(key: str, value: object) -> object:
    if isinstance(value, str):
        return REDACTED if value and _SECRET_KEYS.fullmatch(key) else redact_text(value)
    if isinstance(value, dict):
        return {inner: _clean(str(inner), item) for inner, item in value.items()}
    if isinstance(value, list | tuple | set):
        return [_clean(key, item) for item in value]
    if value is None or isinstance(value, bool | int | float):
        return value
    return redact_text(repr(value))


def redact_text(text: str) -> str:
    """``text`` without API keys, JWTs and credentials in URLs, and in valid Unicode."""
    return _SECRET_TEXT.sub(REDACTED, text).encode(errors="backslashreplace").decode()
