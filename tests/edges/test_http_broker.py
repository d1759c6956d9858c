"""What the frontend does when the broker refuses, fails, falls silent, restarts or answers wrongly; and when clients leave."""

from __future__ import annotations

import logging
import signal
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import numpy as np
import pytest

from edges.fake_broker import DIMENSION, STATE, encode_ids
from edges.frontend_thread import Bench, read_answer, running_frontend, save_tokenizer
from edges.test_http_embeddings import error, vectors
from packhorse_shared.errors import CannotStartError
from packhorse_shared.messages import ErrorCode, RequestFailure
from packhorse_shared.settings import HttpSettings
from waiting import wait_until

BODY = b'{"input":["t10","t11"]}'
POST = b"POST /v1/embeddings HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(BODY)


def hold(bench: Bench) -> None:
    bench.broker.do(lambda: setattr(bench.broker, "is_holding", True))


def wait_state(bench: Bench, **fields: object) -> None:
    bench.broker.change(**fields)

    def is_there() -> bool:
        state = bench.frontend.state.client.state
        return state is not None and all(getattr(state, name) == value for name, value in fields.items())

    wait_until(is_there)


def test_no_worker_is_503_at_once_and_a_full_queue_is_429_before_any_work() -> None:
    """Each with a hint when to come back."""
    with running_frontend() as bench:
        before = len(bench.broker.received)
        wait_state(bench, queue_inputs=100, retry_after_s=7)
        for value in ("t10", ["t10"]):
            answer = bench.post({"input": value})
            found = error(answer, 429)
            assert (found["code"], found["type"], answer.headers["retry-after"]) == ("queue_full", "rate_limit_error", "7")
        assert bench.get("/health").status_code == 200
        wait_state(bench, queue_inputs=99)
        vectors(bench.post({"input": ["t10"] * 50}))
        wait_state(bench, queue_inputs=0, ready_workers=0)
        answer = bench.post({"input": "t10"})
        assert error(answer, 503)["code"] == "no_worker"
        assert answer.headers["retry-after"] == "7"
        assert error(bench.get("/health"), 503)["code"] == "no_worker"
        wait_state(bench, loading_workers=1)
        assert error(bench.post({"input": "t10"}), 503)["code"] == "loading"
        wait_state(bench, draining=True)
        assert error(bench.post({"input": "t10"}), 503)["code"] == "draining"
        assert len(bench.broker.received) == before + 1
        assert bench.get("/live").status_code == 200


@pytest.mark.parametrize(
    ("code", "status", "retry"),
    [
        (ErrorCode.QUEUE_FULL, 429, "5"),
        (ErrorCode.WAIT_TOO_LONG, 429, "5"),
        (ErrorCode.NO_WORKER, 503, "5"),
        (ErrorCode.TIMEOUT, 504, None),
        (ErrorCode.INPUT_TOO_LONG, 400, None),
        (ErrorCode.WORKER_DIED, 500, None),
        (ErrorCode.FORWARD_FAILED, 500, None),
        (ErrorCode.OUT_OF_MEMORY, 503, "5"),
    ],
)
def test_a_failure_becomes_its_status(code: ErrorCode, status: int, retry: str | None) -> None:
    with running_frontend(failure=lambda request: RequestFailure(request.rid, code, "for a reason", 5, 1)) as bench:
        answer = bench.post({"input": ["t10", "t11"]})
        assert error(answer, status)["code"] == code
        assert answer.headers.get("retry-after") == retry


def test_a_request_that_nobody_answers_ends_with_504_and_is_cancelled() -> None:
    with running_frontend(HttpSettings(request_timeout=0.3)) as bench:
        hold(bench)
        found = error(bench.post({"input": "t10"}), 504)
        assert "request_timeout" in found["message"]
        request = bench.broker.received[-1].request
        assert 0 < request.ttl_ms <= 300
        wait_until(lambda: bench.broker.cancelled == [request.rid])


def test_a_client_that_leaves_frees_its_work() -> None:
    with running_frontend() as bench:
        hold(bench)
        with bench.connect() as connection:
            connection.sendall(POST + BODY)
            wait_until(lambda: bench.broker.received)
        wait_until(lambda: bench.broker.cancelled == [bench.broker.received[-1].request.rid])
        wait_until(lambda: bench.frontend.in_flight == 0)
        bench.broker.release()
        vectors(bench.post({"input": "t10"}))


def test_requests_of_one_moment_share_a_message() -> None:
    with running_frontend() as bench:
        connections = [bench.connect() for _ in range(50)]
        for connection in connections:
            connection.sendall(POST + BODY)
        for connection in connections:
            assert read_answer(connection)[0] == 200
            connection.close()
        assert len(bench.broker.received) == 50
        assert len(bench.broker.submits) < 50


def test_a_silent_broker_is_503_at_once_and_open_requests_wait_for_it() -> None:
    with running_frontend() as bench, ThreadPoolExecutor(1) as pool:
        hold(bench)
        waiting = pool.submit(bench.post, {"input": "t10"})
        wait_until(lambda: bench.broker.received)
        bench.broker.do(lambda: setattr(bench.broker, "is_silent", True))
        wait_until(lambda: bench.get("/health").status_code == 503)
        answer = bench.post({"input": "t11"})
        assert error(answer, 503)
        assert answer.headers["retry-after"] == "1"
        assert error(bench.get("/status"), 503)
        bench.broker.do(lambda: setattr(bench.broker, "is_silent", False))
        wait_until(lambda: bench.get("/health").status_code == 200)
        bench.broker.release()
        assert np.array_equal(vectors(waiting.result()), [encode_ids([2, 10, 3])])


def test_a_new_broker_gets_what_is_open_again() -> None:
    with running_frontend() as bench, ThreadPoolExecutor(1) as pool:
        hold(bench)
        waiting = pool.submit(bench.post, {"input": ["t10", "t11"]})
        first = wait_until(lambda: bench.broker.received and bench.broker.received[0])
        # The old broker answered one of two inputs; the new one will answer both.
        bench.broker.do(lambda: bench.broker.send_rows(first.identity, first.request.rid, [0], [encode_ids([9])]))
        bench.broker.restart(boot_id=2)
        again = wait_until(lambda: len(bench.broker.received) > 1 and bench.broker.received[1])
        assert (again.request.rid, again.inputs, again.request.resubmitted) == (first.request.rid, first.inputs, True)
        assert first.request.resubmitted is False
        assert again.request.ttl_ms <= first.request.ttl_ms
        bench.broker.do(lambda: bench.broker.received.pop(0))
        bench.broker.release()
        assert np.array_equal(vectors(waiting.result()), [encode_ids([2, 10, 3]), encode_ids([2, 11, 3])])
        assert len(bench.broker.hellos) == 2


def test_rows_that_do_not_belong_are_not_answered() -> None:
    with running_frontend() as bench, ThreadPoolExecutor(1) as pool:
        hold(bench)
        row = encode_ids([5])
        for indexes, rows in (([2], [row]), ([0], [row[:-1]])):
            seen = len(bench.broker.received)
            waiting = pool.submit(bench.post, {"input": ["t10", "t11"]})
            wait_until(lambda seen=seen: len(bench.broker.received) > seen)
            got = bench.broker.received[-1]
            bench.broker.do(lambda i=indexes, r=rows, got=got: bench.broker.send_rows(got.identity, got.request.rid, i, r))
            assert error(waiting.result(), 500)["code"] == "forward_failed"
        waiting = pool.submit(bench.post, {"input": ["t10", "t11"]})
        wait_until(lambda: len(bench.broker.received) > 2)
        got = bench.broker.received[-1]

        def answer() -> None:
            bench.broker.send_rows(got.identity, got.request.rid + 1000, [0], [row])
            bench.broker.send_rows(got.identity, got.request.rid, [1], [encode_ids([1])])
            bench.broker.send_rows(got.identity, got.request.rid, [1], [row])
            bench.broker.send_rows(got.identity, got.request.rid, [0], [encode_ids([0])])

        bench.broker.do(answer)
        assert np.array_equal(vectors(waiting.result()), [encode_ids([0]), encode_ids([1])])


def test_bytes_that_are_no_message_are_dropped() -> None:
    with running_frontend() as bench:
        vectors(bench.post({"input": "t10"}))
        identity = bench.broker.received[-1].identity
        for frames in ([b""], [b"\x12", b"\xc1", b""], [b"\x11", b"\x90", b""], [b"\xff", b"", b"", b""]):
            bench.broker.do(lambda frames=frames: bench.broker._router.send_multipart([identity, *frames]))
        vectors(bench.post({"input": "t10"}))


def test_status_is_the_brokers_report() -> None:
    with running_frontend() as bench:
        report = bench.get("/status").json()
        assert report["version"] != "another version"
        assert report["queue"]["limit"] == STATE.queue_limit
        assert report["workers"][0]["state"] == "ready"
        assert report["model"]["dimension"] == DIMENSION


def test_it_answers_while_it_loads_and_says_once_when_it_is_ready(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    caplog.set_level(logging.DEBUG)
    folder = save_tokenizer(tmp_path)
    with running_frontend(wait=False, state=STATE, find_model=lambda: wait_until(lambda: may_load and folder)) as bench:
        wait_until(lambda: bench.frontend.state.client.state)
        assert bench.get("/live").status_code == 200
        assert error(bench.get("/health"), 503)["code"] == "loading"
        assert error(bench.post({"input": "t10"}), 503)["code"] == "loading"
        may_load.append(True)
        wait_until(lambda: bench.get("/health").status_code == 200)
        vectors(bench.post({"input": "t10"}))
    assert [record.getMessage() for record in caplog.records].count("ready on http://test") == 1
    refused = next(record for record in caplog.records if record.getMessage() == "request failed")
    assert refused.request_id
    assert refused.status == 503
    assert refused.levelno == logging.DEBUG, "clients that wait for a server must not fill its log"


may_load: list[bool] = []


def test_a_model_without_tokenizer_stops_the_frontend(tmp_path: Path) -> None:
    with running_frontend(wait=False, find_model=lambda: tmp_path) as bench:
        wait_until(lambda: bench.frontend.fault)
        assert isinstance(bench.frontend.fault, CannotStartError)
        assert "tokenizer.json" in str(bench.frontend.fault)
        assert bench.server.should_exit


def test_a_drain_finishes_what_is_in_flight() -> None:
    with running_frontend() as bench, ThreadPoolExecutor(4) as pool:
        hold(bench)
        waiting = [pool.submit(bench.post, {"input": "t10"}) for _ in range(4)]
        wait_until(lambda: len(bench.broker.received) == 4)
        with bench.connect() as kept:
            bench.signal(signal.SIGTERM)
            wait_until(lambda: bench.get("/health").status_code == 503)
            answer = bench.post({"input": "t10"})
            assert error(answer, 503)["code"] == "draining"
            assert answer.headers["connection"] == "close"
            assert answer.headers["retry-after"]
            kept.sendall(POST + BODY)
            assert read_answer(kept)[0] == 503
            assert kept.recv(1) == b""
        assert bench.get("/live").status_code == 200
        bench.broker.release()
        for each in waiting:
            answer = each.result()
            vectors(answer)
            assert answer.headers["connection"] == "close"

        def is_refused() -> bool:
            try:
                bench.get("/live")
            except httpx.TransportError:
                return True
            return False

        wait_until(is_refused)


def test_a_failure_during_a_drain_ends_its_connection_as_well() -> None:
    """Else a client keeps the connection, and its next request meets a server that is gone."""
    codes = [ErrorCode.DRAINING, ErrorCode.TIMEOUT, ErrorCode.WORKER_DIED]
    with running_frontend() as bench, ThreadPoolExecutor(3) as pool:
        hold(bench)
        waiting = [pool.submit(bench.post, {"input": "t10"}) for _ in codes]
        wait_until(lambda: len(bench.broker.received) == len(codes))
        bench.signal(signal.SIGTERM)
        wait_until(lambda: bench.frontend.state.is_draining)
        found = {
            each.request.rid: RequestFailure(each.request.rid, code, "x", 1)
            for each, code in zip(bench.broker.received, codes, strict=True)
        }
        bench.broker.failure = lambda request: found[request.rid]
        bench.broker.release()
        answers = [each.result() for each in waiting]
        assert {(answer.status_code, answer.headers.get("connection")) for answer in answers} == {
            (status, "close") for status in (503, 504, 500)
        }


def test_a_drain_ends_with_the_grace_time() -> None:
    with running_frontend(grace_s=0.3) as bench, ThreadPoolExecutor(1) as pool:
        hold(bench)
        waiting = pool.submit(bench.post, {"input": "t10"})
        wait_until(lambda: bench.broker.received)
        bench.signal(signal.SIGTERM)
        found = error(waiting.result(), 503)
        assert found["code"] == "draining"
        assert "shutdown_grace" in found["message"]
