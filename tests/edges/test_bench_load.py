"""The load that ``packhorse bench`` makes: how many requests are open, when they are sent, and what is noted of each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import msgspec
import pytest
import uvloop
from aiohttp import web

from edges.bench_server import Answer, BenchServer, bench_server, drop, hang, refusal, right
from packhorse.bench.bodies import Recipe, bodies_of_texts
from packhorse.bench.load import Load, Plan
from packhorse.bench.samples import Samples
from packhorse.bench.sender import Sender
from packhorse.bench.stop import Stop
from packhorse.bench.target import open_session

BODIES = bodies_of_texts(Recipe("embeddings", 2, "tiny", "float"), [f"text {number}" for number in range(20)])
CLOSED = Plan(clients=4, rate=None, duration_s=None, requests=40)
OPEN = Plan(clients=50, rate=400.0, duration_s=None, requests=40)


def load(
    server: BenchServer, plan: Plan, timeout_s: float = 20.0, on_look: Callable[[Stop, Samples], None] | None = None
) -> Samples:
    """One slice on the server."""

    async def run() -> Samples:
        stop = Stop()
        async with open_session(server.url, None, timeout_s) as session:
            loading = Load(Sender(session, f"{server.url}/v1/embeddings"), BODIES, stop)
            return await loading.slice(plan, "7", lambda samples: on_look(stop, samples) if on_look else None)

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        return runner.run(run())


def slow(seconds: float) -> Answer:
    async def answer(server: BenchServer, request: web.Request, body: dict[str, Any]) -> web.Response:
        await asyncio.sleep(seconds)
        return await right(server, request, body)

    return answer


def text(content: str) -> Answer:
    async def answer(_server: BenchServer, _request: web.Request, _body: dict[str, Any]) -> web.Response:
        return web.Response(text=content, content_type="application/json")

    return answer


def test_a_closed_loop_keeps_so_many_requests_open_on_as_many_connections() -> None:
    with bench_server(slow(0.01)) as server:
        samples = load(server, CLOSED)
    assert samples.answered == len(server.bodies) == 40
    assert server.most_open == len(server.peers) == 4
    assert sum(samples.inputs) == 80
    assert samples.tokens == 800
    assert min(samples.took) >= 0.01
    assert set(samples.late) == {0.0}


def test_the_servers_own_times_are_noted() -> None:
    with bench_server() as server:
        samples = load(server, CLOSED)
    assert {name: set(values) for name, values in samples.server_ms.items()} == {
        "queue": {1.5},
        "tokenize": {0.25},
        "encode": {4.0},
    }


def test_all_bodies_are_sent_in_turn_and_their_order_follows_from_the_seed() -> None:
    with bench_server() as one, bench_server() as other:
        load(one, msgspec.structs.replace(CLOSED, clients=1))
        load(other, msgspec.structs.replace(CLOSED, clients=1))
    assert one.bodies == other.bodies
    assert len({str(body["input"]) for body in one.bodies[:10]}) == 10
    assert {key for headers in one.headers for key in headers if key == "Authorization"} == set()


def test_a_duration_ends_a_closed_loop() -> None:
    with bench_server(slow(0.001)) as server:
        samples = load(server, msgspec.structs.replace(CLOSED, requests=None, duration_s=0.3))
    assert samples.stopped_at - samples.begun_at == pytest.approx(0.3)
    assert samples.answered == len(server.bodies) > 0
    assert len(samples.loop_lag) > 0
    assert 0 < samples.cpu_share <= 1.5


def test_an_open_loop_does_not_wait_for_answers() -> None:
    with bench_server(slow(1.0)) as server:
        samples = load(server, OPEN)
    assert server.most_open == samples.answered == 40
    assert samples.waited_for_connection == samples.never_sent == 0


def test_the_wait_of_an_open_loop_counts_from_when_a_request_was_due() -> None:
    """40 requests are due within about 0.1 s, one at a time takes 2 s: those that wait are not asked less because of it."""
    with bench_server(slow(0.05)) as server:
        samples = load(server, msgspec.structs.replace(OPEN, clients=1))
    assert server.most_open == 1
    assert samples.answered == 40
    assert samples.waited_for_connection > 30
    assert max(samples.late) > 1.0
    assert max(samples.took) < max(samples.late)


def test_what_an_open_loop_could_not_send_in_time_is_told() -> None:
    with bench_server(hang) as server:
        plan = msgspec.structs.replace(OPEN, clients=1, requests=None, duration_s=0.3)
        samples = load(server, plan, timeout_s=1.0)
    assert samples.begun == 1
    assert samples.never_sent > 50
    assert samples.failures["no answer in time"].count == 1


def test_an_open_loop_lasts_its_time_also_when_the_last_request_was_over_before() -> None:
    """Else few requests, of which the last one rarely comes at the very end, would look like more of them a second."""
    with bench_server() as server:
        samples = load(server, msgspec.structs.replace(OPEN, rate=5.0, requests=None, duration_s=0.5))
    assert samples.stopped_at - samples.begun_at == pytest.approx(0.5)
    assert not samples.is_interrupted


def test_a_full_server_refuses_and_that_is_no_latency() -> None:
    with bench_server(refusal(429, "the queue is full: 5 of 5")) as server:
        samples = load(server, msgspec.structs.replace(CLOSED, requests=8))
    assert (samples.answered, samples.refused, samples.failed) == (0, 8, 0)
    assert samples.refusal == "the queue is full: 5 of 5"
    assert len(samples.took) == 0


@pytest.mark.parametrize(
    ("answer", "kind", "example", "is_transport"),
    [
        (refusal(500, "no\x1b[2J luck"), "HTTP 500", "no\\x1b[2J luck", False),
        (drop, "connection lost", "Server disconnected", True),
        (hang, "no answer in time", "not complete within --timeout", True),
        (text("{"), "wrong answer", "status 200, but Input data was truncated", True),
        (text('{"data": [{}]}'), "wrong answer", "1 results instead of 2", True),
        (text("{}"), "wrong answer", "0 results instead of 2", True),
        (text('"\\ud800"'), "wrong answer", "status 200, but", True),
    ],
)
def test_failures_are_counted_by_kind_with_an_example(answer: Answer, kind: str, example: str, is_transport: bool) -> None:
    with bench_server(answer) as server:
        samples = load(server, msgspec.structs.replace(CLOSED, requests=4), timeout_s=0.3)
    assert list(samples.failures) == [kind]
    found = samples.failures[kind]
    assert found.count == samples.failed == 4
    assert found.is_transport == is_transport
    assert example in found.example
    assert samples.answered == 0


def test_a_server_that_goes_away_is_not_asked_without_a_pause() -> None:
    with bench_server() as server:
        pass
    samples = load(server, msgspec.structs.replace(CLOSED, clients=2, requests=None, duration_s=0.35))
    assert 2 <= samples.failures["no connection"].count <= 8
    assert samples.failures["no connection"].example == "Connection refused"


@pytest.mark.parametrize("plan", [CLOSED, OPEN], ids=["closed", "open"])
def test_a_stop_waits_a_moment_for_answers_and_the_next_one_does_not(plan: Plan) -> None:
    def stop_at_once(stop: Stop, samples: Samples) -> None:
        if samples.begun:
            stop.request()

    with bench_server(hang) as server:
        samples = load(server, plan, on_look=stop_at_once)
    assert samples.abandoned == samples.begun > 0
    assert samples.failed == samples.answered == 0


def test_a_stop_ends_the_wait_for_the_next_arrival() -> None:
    with bench_server() as server:
        samples = load(server, msgspec.structs.replace(OPEN, rate=0.001), on_look=lambda stop, _: stop.request())
    assert samples.begun == 0
