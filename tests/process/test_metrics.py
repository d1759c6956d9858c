"""GET /metrics of a whole server: of all processes behind one scrape, whatever becomes of them and whatever clients send."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest
from prometheus_client.parser import text_string_to_metric_families

from packhorse_shared.meter import count_series
from process.strange_clients import KEY, LEFT, send_strange_requests
from standin import Traps
from standin_stack import StandInStack
from waiting import wait_until

pytestmark = pytest.mark.process

Samples = dict[tuple[str, tuple[str, ...]], float]
GAUGES_AT_REST = ("queue_inputs", "queue_oldest_seconds", "open_requests", "inputs_in_flight", "quarantined_inputs")


@pytest.fixture
def stack(t_model: Path) -> Iterator[StandInStack]:
    """Two frontends, two stand-ins for workers, and a key."""
    made = StandInStack(
        "--num_frontends=2", "--workers_per_device=2", f"--api_key={KEY}", model=t_model, traps=Traps(logs_ids=False)
    )
    made.http.headers["authorization"] = f"Bearer {KEY}"
    try:
        yield made.start().wait_ready(2, frontends=2)
    finally:
        made.clean()


def scrape(client: httpx.Client) -> Samples:
    answer = client.get("/metrics")
    assert answer.status_code == 200, answer.text
    return {
        (sample.name, tuple(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(answer.text)
        for sample in family.samples
    }


def requests_of(samples: Samples, endpoint: str, status: str) -> float:
    return samples["packhorse_requests_total", (endpoint, status)]


def counters(samples: Samples) -> Samples:
    """What may never go back."""
    return {key: value for key, value in samples.items() if key[0].endswith(("_total", "_bucket", "_sum", "_count"))}


@contextlib.contextmanager
def client_of_each(stack: StandInStack) -> Iterator[list[tuple[psutil.Process, httpx.Client]]]:
    """A client for each frontend, with one connection that it keeps."""
    found: dict[psutil.Process, httpx.Client] = {}
    with contextlib.ExitStack() as opened:
        for _ in range(64):
            if len(found) == 2:
                break
            limits = httpx.Limits(max_connections=1, keepalive_expiry=300)
            client = httpx.Client(base_url=stack.url, timeout=30, limits=limits, headers=dict(stack.http.headers))
            opened.enter_context(client)
            with client.stream("GET", "/live") as answer:
                port = answer.extensions["network_stream"].get_extra_info("client_addr")[1]
                answer.read()
                for frontend in stack.processes("frontend"):
                    if port in {each.raddr.port for each in frontend.net_connections() if each.raddr}:
                        found.setdefault(frontend, client)
        assert len(found) == 2, "the kernel gave all connections to one frontend"
        yield list(found.items())


def embed(client: httpx.Client, times: int) -> None:
    for _ in range(times):
        assert client.post("/v1/embeddings", json={"input": ["t10", "t11 t12"]}).status_code == 200


def test_one_scrape_tells_of_both_frontends_and_outlives_them(stack: StandInStack) -> None:
    with client_of_each(stack) as [(doomed, its_client), (_, other)]:
        embed(its_client, 7)
        embed(other, 5)
        for client in (its_client, other):
            wait_until(lambda: requests_of(scrape(client), "embeddings", "200") == 12)  # noqa: B023
        before = scrape(other)
        assert before["packhorse_inputs_total", ()] == 24
        assert before["packhorse_request_seconds_count", ("embeddings",)] == 12
        assert before["packhorse_queue_wait_seconds_count", ()] == 24
        assert before["packhorse_frontends", ()] == 2
        assert (before["packhorse_workers", ("ready",)] + before["packhorse_workers", ("busy",)]) == 2

        os.kill(doomed.pid, signal.SIGKILL)
        wait_until(lambda: scrape(other)["packhorse_frontends", ()] == 1, 10)
        last = counters(scrape(other))
        assert not {key: value for key, value in last.items() if value < counters(before)[key]}
        wait_until(lambda: (now := scrape(other)) and now["packhorse_frontends", ()] == 2, 30)
        now = counters(scrape(other))
        assert not {key: value for key, value in now.items() if value < last[key]}
        embed(other, 3)
        assert requests_of(scrape(other), "embeddings", "200") == 15


def test_counters_follow_a_new_broker_from_zero(stack: StandInStack) -> None:
    with client_of_each(stack) as [(_, one), (_, other)]:
        embed(one, 3)
        assert requests_of(scrape(one), "embeddings", "200") == 3
        (broker,) = stack.processes("broker")
        os.kill(broker.pid, signal.SIGKILL)

        def is_new() -> bool:
            """A scrape waits for the new broker, if that is there soon enough."""
            return one.get("/metrics").status_code == 200 and requests_of(scrape(one), "embeddings", "200") == 0

        wait_until(is_new, 30)
        wait_until(lambda: {one.get("/health").status_code, other.get("/health").status_code} == {200}, 30)
        embed(one, 2)
        found = scrape(one)
        assert requests_of(found, "embeddings", "200") == 2
        assert found["packhorse_uptime_seconds", ()] < 60
        wait_until(lambda: scrape(other)["packhorse_frontends", ()] == 2, 10)


@pytest.mark.timeout(1800)
def test_no_series_grows_with_what_clients_make_up_and_gauges_come_back(stack: StandInStack, soak: bool) -> None:
    """After requests with random models, keys, paths, methods and lengths, some of whose clients left."""
    count = 100_000 if soak else 3_000
    first = scrape(stack.http)
    began = time.monotonic()
    statuses = send_strange_requests(stack.port, count // 2, seed=1)
    middle = scrape(stack.http)
    statuses += send_strange_requests(stack.port, count // 2, seed=2)
    took_s = time.monotonic() - began
    wait_until(lambda: scrape(stack.http)["packhorse_open_requests", ()] == 0, 10)

    def is_all_told() -> bool:
        return sum(value for (name, _), value in scrape(stack.http).items() if name == "packhorse_requests_total") >= count

    wait_until(is_all_told, 5, "every request to be counted")
    last = scrape(stack.http)
    print(f"{count} requests in {took_s:.0f} s, statuses {dict(statuses)}; {len(last)} series")
    assert first.keys() == middle.keys() == last.keys()
    assert len(last) == count_series() < 300
    assert {name: last[f"packhorse_{name}", ()] for name in GAUGES_AT_REST} == dict.fromkeys(GAUGES_AT_REST, 0)
    assert last["packhorse_workers", ("ready",)] == 2
    # Nothing was counted twice or under another status; those that left may have been answered before that was seen.
    counted: dict[int, float] = {}
    for (name, labels), value in last.items():
        if name == "packhorse_requests_total" and labels[0] != "operators":
            status = 405 if labels[1] == "other" else int(labels[1])
            counted[status] = counted.get(status, 0) + value
    for status in (400, 401, 404):
        assert statuses[status] <= counted[status] <= statuses[status] + statuses[LEFT]
    assert counted[499] <= statuses[LEFT]
    assert last["packhorse_request_seconds_count", ("embeddings",)] == requests_of(last, "embeddings", "200")
    assert last["packhorse_batch_inputs_sum", ()] >= last["packhorse_inputs_total", ()] > 0
