"""What a frontend counts, seen where the broker adds it up; and GET /metrics over HTTP."""

from __future__ import annotations

import contextlib
import signal
import socket
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.routing import Route

from edges.frontend_thread import Bench, read_answer, running_frontend
from packhorse_frontend.layers.following import endpoint_of
from packhorse_frontend.layers.keys import Keys
from packhorse_frontend.layers.metering import count_rejection
from packhorse_frontend.problems import Problem
from packhorse_frontend.routes import make_routes
from packhorse_shared import metrics
from packhorse_shared.messages import ErrorCode, RequestFailure
from packhorse_shared.meter import Meter, cell_of, count_series, readings_of
from packhorse_shared.settings import HttpSettings
from waiting import wait_until

BODY = b'{"input":"t10"}'
POST = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY)


def counted(bench: Bench, metric: metrics.Metric = metrics.REQUESTS) -> dict[str, float]:
    """What the fake broker was told of a metric: series that are not 0, by their label values; counts of histograms."""
    values = bench.broker.do(bench.broker.meter.values.copy)
    found = {" ".join(each.labels): (each.value, *each.counts)[-1] for each in readings_of(metric, values)}
    # What the bench itself asked until it was ready.
    return {labels: value for labels, value in found.items() if value and not labels.startswith("operators")}


def wait_counted(bench: Bench, expected: dict[str, float], metric: metrics.Metric = metrics.REQUESTS) -> None:
    wait_until(lambda: counted(bench, metric) == expected, what=f"{metric.name} {expected}, last {counted(bench, metric)}")


def wait_state(bench: Bench, **fields: Any) -> None:
    bench.broker.change(**fields)
    state = bench.frontend.state.client
    wait_until(lambda: state.state is not None and all(getattr(state.state, name) == value for name, value in fields.items()))


# ---- requests ----


@pytest.mark.parametrize(
    ("path", "endpoint"),
    [
        ("/v1/embeddings", "embeddings"),
        ("/embeddings", "embeddings"),
        ("/v2/rerank", "rerank"),
        ("/rerank", "rerank"),
        ("/v1/score", "score"),
        ("/v1/classify", "classify"),
        ("/tokenize", "tokenize"),
        ("/detokenize", "detokenize"),
        ("/v1/models", "models"),
        ("/v1/models/any/name", "models"),
        ("/metrics", "operators"),
        ("/", "operators"),
        ("/v1/embeddingsx", "other"),
        ("/v1/modelsx", "other"),
        ("/v1/completions", "other"),
    ],
)
def test_a_path_has_its_endpoint(path: str, endpoint: str) -> None:
    assert endpoint_of(path) == endpoint


def test_every_route_has_an_endpoint_of_its_own() -> None:
    with running_frontend(wait=False) as bench:
        routes = make_routes(bench.frontend.state)
    paths = [route.path for route in routes if isinstance(route, Route)]
    assert "/metrics" in paths
    assert not [path for path in paths if endpoint_of(path) == "other"]


def test_requests_count_by_endpoint_and_status_whatever_the_path_looks_like() -> None:
    with running_frontend(HttpSettings(root_path="/api", max_body_bytes=1000)) as bench:
        for path in ("/v1/embeddings", "/embeddings/", "/api/v1/embeddings", "/api/api/embeddings//"):
            assert bench.post({"input": "t10"}, path=path).status_code == 200
        assert bench.post({"input": []}).status_code == 400
        assert bench.post({"input": "t10", "model": "another"}).status_code == 404
        assert bench.post(b"x" * 1001).status_code == 413
        assert bench.post(b"x", headers={"content-encoding": "br"}).status_code == 415
        assert bench.get("/v1/embeddings").status_code == 405
        assert bench.get("/v1/models").status_code == 200
        assert bench.get("/v1/models/nobody").status_code == 404
        assert bench.get("/no/such/path").status_code == 404
        assert httpx.head(bench.url + "/v1/models").status_code == 200
        assert httpx.options(bench.url + "/v1/embeddings").status_code == 405
        wait_counted(
            bench,
            {
                "embeddings 200": 4,
                "embeddings 400": 1,
                "embeddings 404": 1,
                "embeddings 413": 1,
                "embeddings 415": 1,
                "embeddings other": 1,
                "models 200": 2,
                "models 404": 1,
                "other 404": 1,
                "other 405": 1,
            },
        )


def test_keys_and_preflights_are_counted_too() -> None:
    with running_frontend(HttpSettings(cors_allow_origin=("https://a.example",)), keys=Keys(["k"])) as bench:
        assert bench.post({"input": "t10"}).status_code == 401
        assert bench.get("/metrics").status_code == 401
        preflight = {"origin": "https://a.example", "access-control-request-method": "POST"}
        assert httpx.options(bench.url + "/v1/embeddings", headers=preflight).status_code == 204
        assert httpx.options(bench.url + "/v1/embeddings", headers=preflight | {"origin": "x"}).status_code == 403
        wait_counted(bench, {"embeddings 401": 1, "other 204": 1, "other 403": 1})
        assert bench.get("/metrics", headers={"authorization": "Bearer k"}).status_code == 200


def test_a_client_that_leaves_counts_as_499() -> None:
    with running_frontend() as bench:
        bench.broker.do(lambda: setattr(bench.broker, "is_holding", True))
        with bench.connect() as connection:
            connection.sendall(POST + BODY)
            wait_until(lambda: bench.broker.received)
        with bench.connect() as connection:
            connection.sendall(POST + BODY[:4])
        wait_counted(bench, {"embeddings 499": 2})
        assert counted(bench, metrics.REQUEST_SECONDS) == {}


def test_a_client_that_leaves_in_the_middle_of_its_answer_counts_as_499() -> None:
    # 6 MB of text, more than the kernel takes off a server's hands.
    with running_frontend(HttpSettings(max_inputs=10_000)) as bench:
        body = b'{"input":[' + b",".join([b'"t10"'] * 10_000) + b"]}"
        with bench.connect() as connection:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            connection.sendall(POST.replace(b"%d" % len(BODY), b"%d" % len(body)) + body)
            assert connection.recv(16).startswith(b"HTTP/1.1 200")
        wait_counted(bench, {"embeddings 499": 1})


def test_answers_that_no_route_gives_count_once() -> None:
    with running_frontend(HttpSettings(receive_timeout=0.3)) as bench:
        assert b" 431 " in bench.exchange(b"GET / HTTP/1.1\r\nx: " + b"x" * 20_000 + b"\r\n\r\n")
        assert b" 400 " in bench.exchange(b"nonsense\r\n\r\n")
        assert b" 408 " in bench.exchange(b"GET / HT")
        wait_counted(bench, {"other 431": 1, "other 400": 1, "other 408": 1})
        # The head was complete: the endpoint is known, and the request was begun.
        assert b" 408 " in bench.exchange(POST + BODY[:4])
        wait_counted(bench, {"other 431": 1, "other 400": 1, "other 408": 1, "embeddings 408": 1})


def test_connections_over_the_limit_are_rejections() -> None:
    with running_frontend(HttpSettings(max_connections=1, keep_alive=5.0)) as bench, bench.connect() as first:
        first.sendall(b"GET /live HTTP/1.1\r\nHost: x\r\n\r\n")
        assert read_answer(first)[0] == 200
        assert b" 503 " in bench.exchange(POST + BODY)
        wait_counted(bench, {"other 503": 1})
        wait_counted(bench, {"too_many_connections": 1}, metrics.REJECTED)


def test_failures_of_the_broker_have_their_status_and_are_no_rejections_of_ours() -> None:
    """The broker counts its own refusals: each request is rejected once."""
    codes = iter((ErrorCode.QUEUE_FULL, ErrorCode.NO_WORKER, ErrorCode.TIMEOUT, ErrorCode.WORKER_DIED))
    with running_frontend(failure=lambda request: RequestFailure(request.rid, next(codes), "so", 5)) as bench:
        for status in (429, 503, 504, 500):
            assert bench.post({"input": "t10"}).status_code == status
        wait_counted(bench, {"embeddings 429": 1, "embeddings 503": 1, "embeddings 504": 1, "embeddings 500": 1})
        assert counted(bench, metrics.REJECTED) == {}
        # Refusals are not timed, what was worked on is.
        assert counted(bench, metrics.REQUEST_SECONDS) == {"embeddings": 2}


def test_rejections_of_the_gate_count_by_reason_and_health_is_none() -> None:
    with running_frontend() as bench:
        wait_state(bench, queue_inputs=100)
        assert bench.post({"input": "t10"}).status_code == 429
        wait_state(bench, queue_inputs=0, ready_workers=0)
        assert bench.post({"input": "t10"}).status_code == 503
        assert bench.get("/health").status_code == 503
        wait_state(bench, loading_workers=1)
        assert bench.post({"input": "t10"}).status_code == 503
        wait_state(bench, draining=True)
        assert bench.post({"input": "t10"}).status_code == 503
        wait_counted(bench, {"queue_full": 1, "no_worker": 1, "loading": 1, "draining": 1}, metrics.REJECTED)


def test_a_rejection_of_an_unknown_kind_is_counted_all_the_same() -> None:
    meter = Meter()
    for code in ("brand_new", None):
        count_rejection(meter, Problem(503, "so", code=code, is_rejection=True))
    assert meter.values[cell_of(metrics.REJECTED, "other")] == 2


def test_a_draining_frontend_tells_its_last_counts() -> None:
    with running_frontend() as bench:
        bench.broker.do(lambda: setattr(bench.broker, "is_holding", True))
        with bench.connect() as connection:
            connection.sendall(POST + BODY)
            wait_until(lambda: bench.broker.received)
            bench.signal(signal.SIGTERM)
            wait_until(lambda: bench.frontend.state.is_draining)
            assert bench.get("/metrics").status_code == 200
            assert bench.post({"input": "t10"}).status_code == 503
            bench.broker.release()
            assert read_answer(connection)[0] == 200
        wait_counted(bench, {"embeddings 200": 1, "embeddings 503": 1})
        assert counted(bench, metrics.REJECTED) == {"draining": 1}


def test_time_is_of_the_whole_request() -> None:
    with running_frontend() as bench:
        bench.broker.do(lambda: setattr(bench.broker, "is_holding", True))
        with bench.connect() as connection:
            connection.sendall(POST + BODY)
            wait_until(lambda: bench.broker.received)
            with contextlib.suppress(AssertionError):
                wait_until(lambda: False, within_s=0.3)
            bench.broker.release()
            assert read_answer(connection)[0] == 200
        wait_counted(bench, {"embeddings": 1}, metrics.REQUEST_SECONDS)
        values = bench.broker.do(bench.broker.meter.values.copy)
        assert next(iter(readings_of(metrics.REQUEST_SECONDS, values))).value >= 0.3


def test_tokenizing_and_cut_inputs() -> None:
    with running_frontend() as bench:
        texts = {"input": ["t10 t11 t12 t13", "t10", "t10 t11 t12 t13 t14"], "truncate_prompt_tokens": 4}
        assert bench.post(texts).json()["usage"]["truncated_inputs"] == 2
        assert bench.post({"input": [[10, 11, 12], [10]], "truncate_prompt_tokens": 2}).status_code == 200
        assert bench.post({"input": "t10"}).status_code == 200
        wait_counted(bench, {"embeddings 200": 3})
        wait_counted(bench, {"": 3}, metrics.TRUNCATED_INPUTS)
        wait_counted(bench, {"": 2}, metrics.TOKENIZE_SECONDS)  # ids are not tokenized


# ---- the way to the broker ----


def test_what_is_counted_while_the_broker_is_away_is_told_the_next_one() -> None:
    with running_frontend() as bench:
        bench.broker.do(lambda: setattr(bench.broker, "is_silent", True))
        wait_until(lambda: bench.get("/health").status_code == 503)
        before = counted(bench)
        assert bench.post({"input": "t10"}).status_code == 503
        bench.broker.restart(2)
        bench.broker.do(lambda: setattr(bench.broker, "is_silent", False))
        wait_counted(bench, before | {"embeddings 503": 1})
        wait_counted(bench, {"no_worker": 1}, metrics.REJECTED)


def test_the_page_holds_what_this_frontend_has_counted_until_now() -> None:
    with running_frontend() as bench:
        for _ in range(3):
            bench.post({"input": "t10"})
        page = bench.get("/metrics")
        assert page.headers["content-type"].startswith("text/plain; version=0.0.4")
        found = {
            (sample.name, tuple(sample.labels.values())): sample.value
            for family in text_string_to_metric_families(page.text)
            for sample in family.samples
        }
        assert found["packhorse_requests_total", ("embeddings", "200")] == 3
        assert found["packhorse_request_seconds_count", ("embeddings",)] == 3
        assert len(found) == count_series()
        assert bench.get("/metrics/", headers={"accept": "application/openmetrics-text"}).text.endswith("# EOF\n")
        head = httpx.head(bench.url + "/metrics")
        assert (head.status_code, head.content) == (200, b"")


def test_several_scrapes_at_once_are_all_answered() -> None:
    from concurrent.futures import ThreadPoolExecutor

    with running_frontend() as bench, ThreadPoolExecutor(8) as threads:
        pages = list(threads.map(lambda _: bench.get("/metrics").status_code, range(24)))
    assert pages == [200] * 24


def test_without_a_broker_there_is_no_page() -> None:
    with running_frontend() as bench:
        bench.broker.do(lambda: setattr(bench.broker, "is_silent", True))
        wait_until(lambda: bench.get("/health").status_code == 503)
        answer = bench.get("/metrics")
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_worker"
        assert answer.headers["retry-after"] == "1"


def test_a_broker_that_falls_silent_in_between_is_a_503_too() -> None:
    with running_frontend() as bench:
        bench.broker.do(lambda: setattr(bench.broker, "is_silent", True))
        answer = bench.get("/metrics")  # it counts as there for another second
        assert answer.status_code == 503
        assert answer.json()["error"]["code"] == "no_worker"


def test_nothing_that_clients_make_up_adds_a_series() -> None:
    with running_frontend() as bench:
        before = {line.rpartition(" ")[0] for line in bench.get("/metrics").text.splitlines()}
        for number in range(50):
            bench.post({"input": "t10", "model": f"model-{number}"}, headers={"authorization": f"Bearer {number}"})
            bench.get(f"/path-{number}/{number}?x={number}")
            httpx.request(f"VERB{number}", bench.url + "/v1/embeddings")
        after = {line.rpartition(" ")[0] for line in bench.get("/metrics").text.splitlines()}
        assert after == before
        wait_until(lambda: counted(bench).get("embeddings 404") == 50)
