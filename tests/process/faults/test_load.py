"""The tools of these tests themselves: a load must see every kind of fault, or the tests of faults show nothing."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import orjson
import pytest

from footprint import Settled
from http_answers import AnswerReader
from load import Load
from questions import Question, ask, ids_of, random_questions
from report import HUNG, Report
from standin import row_of
from standin_stack import StandInFactory

pytestmark = pytest.mark.process

QUESTION = ask(["t10 t11"])
ROW = row_of(ids_of("t10 t11")).tolist()
RIGHT = orjson.dumps({"data": [{"index": 0, "embedding": ROW}]})
WRONG = orjson.dumps({"data": [{"index": 0, "embedding": row_of(ids_of("t11 t10")).tolist()}]})
ENVELOPE = orjson.dumps({"error": {"message": "no", "type": "t", "param": None, "code": "c"}})


def answer(body: bytes, status: int = 200, *headers: str) -> bytes:
    lines = [f"HTTP/1.1 {status} x", f"Content-Length: {len(body)}", "x-request-id: 1", *headers, "", ""]
    return "\r\n".join(lines).encode() + body


@contextmanager
def server_that_says(reply: bytes | None) -> Iterator[int]:
    """The port of a server that answers the first request on its one connection with these bytes, or never; then it closes."""
    asked_enough = threading.Event()

    def serve() -> None:
        connection, _ = listener.accept()
        with connection:
            connection.recv(65536)
            if reply is None:
                asked_enough.wait(10)
            else:
                connection.sendall(reply)
                if reply:
                    connection.recv(65536)

    with socket.create_server(("127.0.0.1", 0)) as listener:
        thread = threading.Thread(target=serve)
        thread.start()
        yield int(listener.getsockname()[1])
        asked_enough.set()
        thread.join(10)


def report_of(reply: bytes | None, question: Question = QUESTION) -> Report:
    with server_that_says(reply) as port, Load(port, [question], rate=100, at_most=1, patience_s=0.3) as load:
        return load.wait_done()


@pytest.mark.parametrize(
    ("reply", "outcome", "fault"),
    [
        (answer(RIGHT), 200, None),
        (answer(WRONG), 200, "wrong vectors"),
        (answer(orjson.dumps({"data": []})), 200, "wrong vectors"),
        (answer(RIGHT) + answer(RIGHT), 200, "bytes behind an answer"),
        (answer(RIGHT).replace(b"x-request-id", b"x-other"), 200, "no x-request-id"),
        (answer(ENVELOPE, 503, "Retry-After: 2"), 503, None),
        (answer(ENVELOPE, 503), 503, "retry-after"),
        (answer(ENVELOPE, 429, "retry-after: 121"), 429, "retry-after"),
        (answer(b"oh", 500), 500, "no error envelope"),
        (answer(RIGHT)[:-1], HUNG, "no answer: hung"),
        (b"", "closed without an answer", "no answer: closed"),
        (None, HUNG, "no answer: hung"),
    ],
)
def test_every_fault_is_seen(reply: bytes | None, outcome: int | str, fault: str | None) -> None:
    report = report_of(reply)
    assert dict(report.counts) == {outcome: 1}
    found = report.faults()
    assert (not found) if fault is None else any(fault in each for each in found), found


def test_an_answer_after_the_timeout_is_a_fault() -> None:
    report = report_of(answer(RIGHT))
    report.sent[0].ended += 2.1
    assert report.faults(timeout_s=1.0)
    assert not report.faults(timeout_s=2.0)


def test_refused_connections_are_counted() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with Load(port, [QUESTION], clients=2, at_most=4) as load:
        assert dict(load.wait_done().counts) == {"ConnectionRefusedError": 4}


@pytest.mark.parametrize("step", [1, 7, 1000])
def test_answers_are_read_whatever_the_pieces_that_they_come_in(step: int) -> None:
    chunked = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n"
    stream = answer(b"first", 429) + chunked + answer(b"")
    reader, bodies = AnswerReader(), []
    for start in range(0, len(stream), step):
        reader.feed(stream[start : start + step])
        while (found := reader.take()) is not None:
            bodies.append((found.status, found.body))
    assert bodies == [(429, b"first"), (200, b"abcde"), (200, b"")]
    assert reader.left == b""


def test_rows_tell_inputs_apart() -> None:
    rows = {row_of([2, *words, 3]).tobytes() for words in ([10, 11], [11, 10], [10], [10, 10], [12, 9])}
    assert len(rows) == 5


def test_stand_ins_serve_and_count_what_they_compute(make_standin: StandInFactory, settled: Settled) -> None:
    stack = make_standin("--workers_per_device=2").start().wait_ready(2)
    with settled(stack):
        with Load(stack.port, random_questions(seed=1, inputs=2), rate=200, seed=1, at_most=200) as singles:
            report = singles.wait_done()
        with Load(stack.port, [QUESTION], clients=8, at_most=200) as repeated:
            assert dict(repeated.wait_done().counts) == {200: 200}
    report.assert_invariant()
    assert dict(report.counts) == {200: 200}
    asked = [ids for batch in stack.computed() for ids in batch.ids]
    assert sum(ids == ids_of("t10 t11") for ids in asked) == 200
    assert len(asked) - sum(ids == [2, 10, 3] for ids in asked) == 600  # the canaries of a worker's start are not counted
