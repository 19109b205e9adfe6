"""Where spans are sent."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

from tinsmith.config import Section


class TracingConfig(Section, frozen=True, kw_only=True):
    """Spans of requests across services, as OpenTelemetry has them."""

    endpoint: str = ""
    """Base address of an OTLP collector over HTTP, e.g. ``http://collector:4318``; empty: no spans.
    Needs ``tinsmith[tracing]``. ``OTEL_EXPORTER_OTLP_HEADERS`` gives headers to send along."""
    share: Annotated[float, Meta(ge=0, le=1)] = 1.0
    """Share of the requests that are traced; the gateway decides, the others follow it."""
