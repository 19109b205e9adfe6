"""Spans of what is done for a request, in whichever service; nothing at all unless configured."""

from tinsmith.tracing.spans import HEADER, carried, serving, span

__all__ = ["HEADER", "carried", "serving", "span"]
