"""The spans: begun here, carried over the bus as ``traceparent``, exported by OpenTelemetry.

Its packages are imported when an endpoint is configured, and by nobody else.
"""

from __future__ import annotations

import asyncio
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any

import structlog

from tinsmith import __version__
from tinsmith.errors import StartupError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from tinsmith.tracing.config import TracingConfig

HEADER = "traceparent"
"""Of W3C Trace Context, in HTTP and on the bus."""

FLUSH_MS = 3000  # for spans that are not exported yet when the service ends
_EXPORTER = "opentelemetry.exporter.otlp.proto.http"


class _Spans:
    """Makes spans; there is one while tracing is on."""

    def __init__(self, config: TracingConfig, service: str, instance: str) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ParentBased, TraceIdRatioBased
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        ratio = TraceIdRatioBased(config.share)
        # A client's wish to be traced counts no more than anybody's: the share stays what it is.
        from_clients = {"remote_parent_sampled": ratio, "remote_parent_not_sampled": ALWAYS_OFF}
        sampler = ParentBased(ratio, **(from_clients if service == "gateway" else {}))
        resource = {
            "service.name": f"tinsmith-{service}",
            "service.instance.id": instance,
            "service.version": __version__,
        }
        self._provider = TracerProvider(
            sampler=sampler, resource=Resource.create(resource), shutdown_on_exit=False
        )
        endpoint = f"{config.endpoint.rstrip('/')}/v1/traces"
        self._provider.add_span_processor(BatchSpanProcessor(OTLPSpanExporter(endpoint=endpoint)))
        self._tracer = self._provider.get_tracer("tinsmith", __version__)
        self._propagator = TraceContextTextMapPropagator()

    @contextmanager
    def span(self, name: str, parent: str | None, attributes: dict[str, Any]) -> Iterator[None]:
        from opentelemetry.trace import SpanKind

        # None: a child of the span that it is made in, if any.
        context = None if parent is None else self._propagator.extract({HEADER: parent})
        kind = SpanKind.INTERNAL if parent is None else SpanKind.SERVER
        with self._tracer.start_as_current_span(
            name, context=context, kind=kind, attributes=attributes
        ) as made:
            trace_id = f"{made.get_span_context().trace_id:032x}"
            with structlog.contextvars.bound_contextvars(trace_id=trace_id):
                yield

    def carried(self) -> dict[str, str]:
        carrier: dict[str, str] = {}
        self._propagator.inject(carrier)
        return {HEADER: carrier[HEADER]} if HEADER in carrier else {}

    def close(self) -> None:
        self._provider.force_flush(FLUSH_MS)
        self._provider.shutdown()


class _Tracing:
    """Whether it is on in this process."""

    spans: _Spans | None = None


def span(
    name: str, *, parent: str | None = None, **attributes: str | float | bool
) -> AbstractContextManager[None]:
    """What is done in the block, as a span of the trace that ``parent``, a header, names.

    An empty ``parent`` begins a trace; None goes on with the one that the block is in.
    """
    if _Tracing.spans is None:
        return nullcontext()
    return _Tracing.spans.span(name, parent, attributes)


def carried() -> dict[str, str]:
    """Headers by which whoever gets them goes on with the present trace."""
    return {} if _Tracing.spans is None else _Tracing.spans.carried()


@asynccontextmanager
async def serving(config: TracingConfig, *, service: str, instance: str) -> AsyncIterator[None]:
    """Spans are made and exported inside the block, if that is configured.

    Raises:
        StartupError: the packages for it are not installed.
    """
    if not config.endpoint:
        yield
        return
    if find_spec("opentelemetry") is None or find_spec(_EXPORTER) is None:
        raise StartupError(
            "tracing.endpoint: the OpenTelemetry exporter is not installed; "
            "pip install 'tinsmith[tracing]', or leave the endpoint empty"
        )
    _Tracing.spans = spans = _Spans(config, service, instance)
    try:
        yield
    finally:
        _Tracing.spans = None
        await asyncio.to_thread(spans.close)
