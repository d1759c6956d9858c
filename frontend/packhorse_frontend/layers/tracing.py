"""Traces: a span for each request under its caller's ``traceparent``, and within it its stages. For the extra ``otel``.

See https://opentelemetry.io/docs/specs/semconv/http/http-spans for the names, https://www.w3.org/TR/trace-context for the
header. Spans are made when the request is over, of the moments that were noted on the way (``timing.py``), and leave in a
thread of the library's; while nobody takes them they are dropped, which two lines tell of: when that begins and when it ends.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from opentelemetry import trace
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import SERVICE_INSTANCE_ID, SERVICE_NAME, SERVICE_VERSION, Resource
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SpanExporter, SpanExportResult
from opentelemetry.trace import Span, SpanKind, Status, StatusCode
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from packhorse_frontend.layers.following import EndedRequest
from packhorse_frontend.timing import Timing
from packhorse_shared import __version__

log = logging.getLogger(__name__)

CLOSE_WITHIN_S = 3.0
"""How long a stop waits for the collector to take what is left. The library would try for half a minute."""
_NS = 1_000_000_000
_EXPORT_TIMEOUT_S = 5
_LONGEST_COMPLAINT = 500
_OPERATORS = "operators"
"""Probes and scrapes are not traced: they come every few seconds and nobody asks after them."""
_propagator = TraceContextTextMapPropagator()


def open_exporter(endpoint: str) -> SpanProcessor:
    """Sends spans to an OTLP collector over HTTP, from a thread, in batches."""
    return BatchSpanProcessor(_Collector(OTLPSpanExporter(endpoint=endpoint, timeout=_EXPORT_TIMEOUT_S)))


class _Collector(SpanExporter):
    """Passes spans on, and tells when they are no longer taken and when they are again. The library says so for each batch."""

    def __init__(self, exporter: SpanExporter) -> None:
        self._exporter = exporter
        self._complaints = _Complaints()
        self._is_failing = False

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        """Returns whether they were taken."""
        try:
            result = self._exporter.export(spans)
        except Exception as problem:  # else the library would say so for each batch
            result, self._complaints.last = SpanExportResult.FAILURE, repr(problem)[:_LONGEST_COMPLAINT]
        is_failing = result is not SpanExportResult.SUCCESS
        if is_failing and not self._is_failing:
            message = "the collector takes no traces (otlp_traces_endpoint): they are dropped until it does"
            log.warning(message, extra={"reason": self._complaints.last})
        elif self._is_failing and not is_failing:
            log.info("the collector takes traces again")
        self._is_failing = is_failing
        return result

    def shutdown(self) -> None:
        """Close what sends."""
        self._exporter.shutdown()


class _Complaints(logging.Handler):
    """Keeps what the exporter last had to complain of, instead of the library's lines: some quote what clients send."""

    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.last = ""
        library = logging.getLogger("opentelemetry")
        library.setLevel(logging.ERROR)
        library.handlers, library.propagate = [logging.NullHandler()], False
        logging.getLogger("opentelemetry.exporter").handlers = [self]

    def emit(self, record: logging.LogRecord) -> None:
        self.last = record.getMessage()[:_LONGEST_COMPLAINT]


class Tracing:
    """What makes spans in this process. To be closed in the end, which sends what is left."""

    def __init__(self, processor: SpanProcessor, index: int) -> None:
        resource = Resource.create({SERVICE_VERSION: __version__, SERVICE_INSTANCE_ID: f"frontend-{index}"})
        if str(resource.attributes[SERVICE_NAME]).startswith("unknown_service"):  # unless OTEL_SERVICE_NAME says something
            resource = resource.merge(Resource({SERVICE_NAME: "packhorse"}))
        self._provider = TracerProvider(resource=resource, shutdown_on_exit=False)
        self._provider.add_span_processor(processor)
        self._tracer = self._provider.get_tracer("packhorse", __version__)

    def record(self, request: EndedRequest) -> None:
        """Make the spans of a request that is over."""
        if request.endpoint == _OPERATORS:
            return
        clock = _Clock()
        carrier = {name.decode("latin-1"): value.decode("latin-1") for name, value in request.headers if name in _HEADERS}
        parent = _propagator.extract(carrier)
        name = f"{request.method} {request.endpoint}"
        span = self._tracer.start_span(name, parent, SpanKind.SERVER, start_time=clock.at(request.began))
        span.set_attributes({"http.request.method": request.method, "http.response.status_code": request.status})
        if "request_id" in request.state:
            span.set_attribute("packhorse.request_id", request.state["request_id"])
        if request.status >= 500:
            span.set_status(Status(StatusCode.ERROR))
        timing = request.state.get("timing")
        if timing is not None:
            self._record_stages(span, timing, clock)
        span.end(clock.at(request.ended))

    def _record_stages(self, span: Span, timing: Timing, clock: _Clock) -> None:
        context = trace.set_span_in_context(span)
        stages: list[tuple[str, float, float]] = []
        if timing.tokenize_began is not None:
            stages.append(("tokenize", timing.tokenize_began, timing.tokenize_s))
        if timing.asked_at is not None and timing.answered_at is not None:
            span.set_attributes({"packhorse.inputs": timing.inputs, "packhorse.tokens": timing.tokens})
            stages.append(("queue", timing.asked_at, timing.queue_ms / 1000))
            stages.append(("encode", timing.answered_at - timing.encode_ms / 1000, timing.encode_ms / 1000))
        for name, began, took_s in stages:
            child = self._tracer.start_span(name, context, start_time=clock.at(began))
            child.end(clock.at(began + took_s))

    def close(self) -> None:
        """Send what is left. Takes up to ``CLOSE_WITHIN_S`` where nobody takes it: then it is dropped."""
        # Not joined, and no thread that Python joins at its end: the library cannot be interrupted.
        closing = threading.Thread(target=self._provider.shutdown, name="traces", daemon=True)
        closing.start()
        closing.join(CLOSE_WITHIN_S)
        if closing.is_alive():
            log.warning("the collector does not take the last traces: they are dropped", extra={"waited_s": CLOSE_WITHIN_S})


_HEADERS = frozenset({b"traceparent", b"tracestate"})


class _Clock:
    """Turns moments of ``time.monotonic`` into wall-clock time, as it is now."""

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def at(self, moment: float) -> int:
        """Nanoseconds since 1970."""
        return self._offset_ns + int(moment * _NS)
