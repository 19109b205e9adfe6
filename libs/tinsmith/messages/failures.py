"""The one place where an exception becomes a ``Failed`` message, and the one way back."""

from __future__ import annotations

from tinsmith import errors
from tinsmith.messages.base import Failed

_CLASSES: dict[str, type[errors.TinsmithError]] = {
    name: value
    for name, value in vars(errors).items()
    if isinstance(value, type) and issubclass(value, errors.TinsmithError)
}


MAX_MESSAGE = 4000  # characters


def message_of(exc: errors.TinsmithError) -> str:
    """What an error says, fit to travel: it may quote what was sent, of any length and encoding."""
    text = str(exc)
    if len(text) > MAX_MESSAGE:
        text = f"{text[: MAX_MESSAGE // 2]} [...] {text[-MAX_MESSAGE // 2 :]}"
    # Header lines and paths hold bytes that are no UTF-8 as lone surrogates.
    return text.encode(errors="backslashreplace").decode()


def to_failed(exc: BaseException) -> Failed:
    """What the sender of a request is told; internals of unexpected errors stay in our log."""
    if isinstance(exc, errors.TinsmithError):
        return Failed(category=exc.category, message=message_of(exc), code=type(exc).__name__)
    return Failed(
        category="server",
        message=f"internal error ({type(exc).__name__}); the server's log has the details",
    )


def to_exception(failed: Failed) -> errors.TinsmithError:
    """The error that ``failed`` stands for, ready to be raised."""
    if (known := _CLASSES.get(failed.code)) is not None:
        return known(failed.message)
    return (errors.UserError if failed.category == "user" else errors.ServerError)(failed.message)
