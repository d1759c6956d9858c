"""Traces of requests: their spans, their parent, and a collector that takes them over HTTP."""

from __future__ import annotations

import http.server
import logging
import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind, StatusCode

from edges.frontend_thread import Bench, running_frontend
from packhorse_frontend.__main__ import _open_tracing
from packhorse_frontend.layers.following import EndedRequest
from packhorse_frontend.layers.tracing import CLOSE_WITHIN_S, Tracing, open_exporter
from packhorse_shared.errors import SettingsError
from packhorse_shared.messages import ErrorCode, RequestFailure
from packhorse_shared.settings import HttpSettings
from waiting import wait_until

PARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


@contextmanager
def traced(**options: Any) -> Iterator[tuple[Bench, InMemorySpanExporter]]:
    exporter = InMemorySpanExporter()
    tracing = Tracing(SimpleSpanProcessor(exporter), 3)
    try:
        with running_frontend(tracing=tracing, **options) as bench:
            yield bench, exporter
    finally:
        tracing.close()


def ended() -> EndedRequest:
    now = time.monotonic()
    return EndedRequest("POST", "embeddings", [], {}, 200, now - 0.01, now)


def spans_of(exporter: InMemorySpanExporter, count: int) -> dict[str, ReadableSpan]:
    """The spans so far, by name; the request's own is the last to end."""
    wait_until(lambda: len(exporter.get_finished_spans()) >= count)
    spans = exporter.get_finished_spans()
    assert len(spans) == count, [span.name for span in spans]
    return {span.name: span for span in spans}


def test_a_request_is_a_span_under_its_callers_with_its_stages_within() -> None:
    with traced() as (bench, exporter):
        answer = bench.post({"input": ["t10", "t11"]}, headers={"traceparent": PARENT, "x-request-id": "abc"})
        assert answer.status_code == 200
        spans = spans_of(exporter, 4)
    request = spans["POST embeddings"]
    assert request.kind is SpanKind.SERVER
    assert (request.context.trace_id, request.parent.span_id) == (0x0AF7651916CD43DD8448EB211C80319C, 0xB7AD6B7169203331)
    assert dict(request.attributes) == {
        "http.request.method": "POST",
        "http.response.status_code": 200,
        "packhorse.request_id": "abc",
        "packhorse.inputs": 2,
        "packhorse.tokens": 6,
    }
    assert request.resource.attributes["service.name"] == "packhorse"
    assert request.resource.attributes["service.instance.id"] == "frontend-3"
    for name in ("tokenize", "queue", "encode"):
        stage = spans[name]
        assert stage.parent.span_id == request.context.span_id
        assert request.start_time <= stage.start_time <= stage.end_time <= request.end_time
    assert spans["queue"].end_time - spans["queue"].start_time == pytest.approx(100_000, abs=1000)
    assert spans["encode"].end_time - spans["encode"].start_time == pytest.approx(200_000, abs=1000)


def test_a_request_that_is_refused_has_no_stages() -> None:
    with traced() as (bench, exporter):
        assert bench.post({"input": []}).status_code == 400
        assert bench.post({"input": "t10"}, path="/nowhere/at/all").status_code == 404
        spans = spans_of(exporter, 2)
    assert set(spans) == {"POST embeddings", "POST other"}
    assert spans["POST embeddings"].attributes["http.response.status_code"] == 400
    assert spans["POST embeddings"].parent is None
    assert spans["POST embeddings"].status.status_code is StatusCode.UNSET


def test_a_fault_of_the_server_is_an_error() -> None:
    def fail(request: Any) -> RequestFailure:
        return RequestFailure(request.rid, ErrorCode.FORWARD_FAILED, "no")

    with traced(failure=fail) as (bench, exporter):
        assert bench.post({"input": "t10"}).status_code == 500
        spans = spans_of(exporter, 2)
    assert spans["POST embeddings"].status.status_code is StatusCode.ERROR
    assert set(spans) == {"POST embeddings", "tokenize"}


def test_probes_are_not_traced() -> None:
    with traced() as (bench, exporter):
        for path in ("/health", "/live/", "/status", "/metrics"):
            bench.get(path)
        assert bench.post({"input": "t10"}).status_code == 200
        spans_of(exporter, 4)


def test_a_parent_that_is_none_begins_a_trace() -> None:
    with traced() as (bench, exporter):
        for parent in ("", "00-zz-zz-01", "x" * 4000):
            assert bench.post({"input": "t10"}, headers={"traceparent": parent}).status_code == 200
        wait_until(lambda: len(exporter.get_finished_spans()) == 12)
        assert all(span.parent is None for span in exporter.get_finished_spans() if span.kind is SpanKind.SERVER)


def test_the_prefix_of_a_proxy_is_no_part_of_the_name() -> None:
    with traced(http=HttpSettings(root_path="/ai")) as (bench, exporter):
        assert bench.post({"input": "t10"}, path="/ai/v1/embeddings/").status_code == 200
        assert "POST embeddings" in spans_of(exporter, 4)


def test_spans_reach_a_collector() -> None:
    received: list[ExportTraceServiceRequest] = []

    class Collector(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["content-length"]))
            if self.headers.get("content-encoding") is None:
                received.append(ExportTraceServiceRequest.FromString(body))
            self.send_response(200)
            self.send_header("content-length", "0")
            self.end_headers()

        def log_message(self, *_arguments: Any) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Collector) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        tracing = Tracing(open_exporter(f"http://127.0.0.1:{server.server_port}/v1/traces"), 0)
        with running_frontend(tracing=tracing) as bench:
            bench.post({"input": "t10"})
        tracing.close()
        server.shutdown()
        thread.join(5)
    resources = [each for batch in received for each in batch.resource_spans]
    names = [span.name for each in resources for scope in each.scope_spans for span in scope.spans]
    assert sorted(names) == ["POST embeddings", "encode", "queue", "tokenize"]


class Trouble(http.server.BaseHTTPRequestHandler):
    """A collector in trouble: it says 500 until it is well again."""

    is_well = threading.Event()

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200 if self.is_well.is_set() else 500)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *_arguments: Any) -> None:
        pass


def test_a_collector_in_trouble_is_told_of_once_and_once_more_when_it_is_well(caplog: pytest.LogCaptureFixture) -> None:
    """Not once for each batch: under load that is several lines a second."""
    caplog.set_level(logging.INFO)

    def told() -> list[str]:
        return [record.getMessage() for record in caplog.records if record.name.startswith(("packhorse", "opentelemetry"))]

    Trouble.is_well.clear()
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Trouble) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        processor = open_exporter(f"http://127.0.0.1:{server.server_port}/v1/traces")
        tracing = Tracing(processor, 0)
        for _ in range(5):
            tracing.record(ended())
            processor.force_flush()
        assert told() == ["the collector takes no traces (otlp_traces_endpoint): they are dropped until it does"]
        (record,) = [record for record in caplog.records if "collector" in record.getMessage()]
        assert "500" in record.reason
        Trouble.is_well.set()
        for _ in range(3):
            tracing.record(ended())
            processor.force_flush()
        assert told()[1:] == ["the collector takes traces again"]
        tracing.close()
        server.shutdown()


def test_an_exporter_that_raises_is_told_of_as_well(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def refuse(*_: Any) -> None:
        raise ValueError("cannot be encoded")

    monkeypatch.setattr(OTLPSpanExporter, "export", refuse)
    processor = open_exporter("http://127.0.0.1:9/v1/traces")
    tracing = Tracing(processor, 0)
    for _ in range(3):
        tracing.record(ended())
        processor.force_flush()
    tracing.close()
    assert [record.reason for record in caplog.records] == ["ValueError('cannot be encoded')"]


def test_a_collector_that_hangs_does_not_hold_up_a_stop() -> None:
    """It accepts connections and never answers. What is left is dropped: a stop has better things to wait for."""
    with socket.create_server(("127.0.0.1", 0)) as hangs:
        tracing = Tracing(open_exporter(f"http://127.0.0.1:{hangs.getsockname()[1]}/v1/traces"), 0)
        for _ in range(2000):
            tracing.record(ended())
        closing = threading.Thread(target=tracing.close, daemon=True)
        closing.start()
        closing.join(CLOSE_WITHIN_S + 2)
        assert not closing.is_alive(), "close() is longer than it says"


def test_a_collector_that_is_not_there_costs_no_request() -> None:
    tracing = Tracing(open_exporter("http://127.0.0.1:9/v1/traces"), 0)
    with running_frontend(tracing=tracing) as bench:
        assert [bench.post({"input": "t10"}).status_code for _ in range(20)] == [200] * 20
    tracing.close()


def test_the_service_may_be_given_another_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_SERVICE_NAME", "search")
    with traced() as (bench, exporter):
        bench.post({"input": "t10"})
        assert spans_of(exporter, 4)["POST embeddings"].resource.attributes["service.name"] == "search"


def test_an_address_that_is_none_stops_the_start() -> None:
    with pytest.raises(SettingsError, match="otlp_traces_endpoint"):
        _open_tracing("localhost:4318", 0)


def test_without_the_libraries_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "packhorse_frontend.layers.tracing", None)
    with pytest.raises(SettingsError, match=r"packhorse\[otel\]"):
        _open_tracing("http://localhost:4318/v1/traces", 0)
