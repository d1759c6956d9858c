"""What must not grow with the requests: the memory of every process, and the number of metrics."""

from __future__ import annotations

import psutil
import pytest

from edges.test_http_embeddings import vectors
from questions import http_request
from reports.asking import ask, metrics, wait_idle
from reports.traffic import Wire, drive, mixed
from stack import Stack
from waiting import wait_until

pytestmark = [pytest.mark.process, pytest.mark.timeout(600)]

SEED = 95
MIB = 1 << 20
MOST_SERIES = 300
STRANGE = 50


def resident(stack: Stack) -> dict[int, int]:
    """Bytes of every process."""
    return {process.pid: process.memory_info().rss for process in stack.processes()}


def growth(before: dict[int, int], after: dict[int, int]) -> list[str]:
    """Processes that hold more than allocators may keep."""
    assert before.keys() == after.keys(), "no process was started again"
    return [
        f"{psutil.Process(pid).cmdline()}: {before[pid] // MIB} MiB, then {after[pid] // MIB} MiB"
        for pid in before
        if after[pid] > 1.03 * before[pid] + 20 * MIB
    ]


def test_memory_does_not_grow_with_requests(stack: Stack, soak: bool) -> None:
    """A cache without a bound, or a request that is forgotten only when it ends well: memory goes up until nothing is left."""
    first, more = (10_000, 40_000) if soak else (1_000, 2_000)
    statuses = drive(stack.port, first, mixed(SEED))
    wait_idle(stack)
    before = resident(stack)
    statuses += drive(stack.port, more, mixed(SEED + 1))
    wait_idle(stack)
    after = resident(stack)
    print(f"seed {SEED}: {dict(statuses)}; MiB {[(before[pid] // MIB, after.get(pid, 0) // MIB) for pid in before]}")
    assert set(statuses) <= {0, 200, 400, 503}, "503: a machine so busy that a worker is not heard of for a second"
    assert min(statuses[0], statuses[400]) > 0.05 * (first + more)
    assert statuses[200] > 0.7 * (first + more)
    assert not growth(before, after)


def test_one_long_list_leaves_no_memory_behind(stack: Stack) -> None:
    """One request as large as allowed raises the memory of a worker for good."""
    vectors(ask(stack, {"input": "t10 " * 62}))
    workers = stack.processes("worker")
    before = {worker.pid: worker.memory_info().rss for worker in workers}
    texts = ["t10 " * (1 + number % 62) for number in range(2000)]
    assert len(ask(stack, {"input": texts, "encoding_format": "base64"}).json()["data"]) == 2000
    wait_idle(stack)
    for worker in workers:
        assert worker.memory_info().rss - before[worker.pid] < 50 * MIB


def strange(number: int) -> Wire:
    """Every length, and names and paths that nobody has heard of."""
    if number % 20 == 0:
        return Wire(http_request(b'{"input":"t10","model":"strange-%d"}' % (number // 20 % STRANGE)))
    if number % 20 == 10:
        return Wire(http_request(b"{}", path=f"/strange/{number // 20 % STRANGE}"))
    return Wire(http_request(b'{"input":"%s"}' % b" ".join([b"t10"] * (1 + number % 62))))


def test_the_number_of_metrics_is_fixed(stack: Stack) -> None:
    """A series for every length that was ever seen, or for every name that anybody sends: more each day."""
    count = 2000
    statuses = drive(stack.port, count, strange)
    assert set(statuses) == {200, 404}
    assert statuses[404] == 2 * count // 20
    wait_until(lambda: counted(stack) >= count, 10, "the requests in the metrics")
    before = metrics(stack)
    assert len(before) < MOST_SERIES
    drive(stack.port, count, strange)
    wait_until(lambda: counted(stack) >= 2 * count, 10, "the other requests in the metrics")
    after = metrics(stack)
    assert after.keys() == before.keys()
    assert not [name for name in after if "strange" in name]
    wait_until(lambda: metrics(stack)["packhorse_queue_inputs{}"] == 0, 10, "an empty queue in the metrics")


def counted(stack: Stack) -> float:
    """HTTP requests of every endpoint and status."""
    return sum(value for name, value in metrics(stack).items() if name.startswith("packhorse_requests_total{"))
