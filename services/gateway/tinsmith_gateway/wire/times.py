"""Unix times in nanoseconds as the ISO 8601 texts that clients read, and back."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from tinsmith.errors import InvalidRequest

_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)
_MICROSECOND = timedelta(microseconds=1)


def iso_time(unix_ns: int) -> str:
    """In UTC, cut to microseconds."""
    return (_EPOCH + unix_ns // 1000 * _MICROSECOND).isoformat()


def microseconds(text: str, field: str) -> int:
    """Unix time in microseconds of ``text``, which has an offset; InvalidRequest otherwise."""
    try:
        time = datetime.fromisoformat(text)
        return (time - _EPOCH) // _MICROSECOND
    except (ValueError, TypeError, OverflowError):
        raise InvalidRequest(
            f"{field}: {text[:80]!r} is not a time with an offset, as in 2026-01-31T12:00:00Z"
        ) from None
