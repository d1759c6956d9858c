"""A full queue: one rule for all, refused whole, and with a hint that clients follow."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor

import httpx
import pytest

from edges.test_http_embeddings import error, vectors
from reports.asking import ask, in_system, metrics, wait_idle
from standin_stack import StandInFactory, StandInStack
from waiting import wait_until

pytestmark = pytest.mark.process

QUEUE = 8
BATCH = 32
SINGLES = 64
MOST_LENGTH = 60


@pytest.fixture(scope="module")
def stack(make_standin: StandInFactory) -> StandInStack:
    return make_standin(f"--max_queue_size={QUEUE}").start().wait_ready()


@pytest.fixture
def pool() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(SINGLES) as running:
        yield running


def fill(stack: StandInStack, pool: ThreadPoolExecutor) -> list[Future[httpx.Response]]:
    """Send singles, each when the one before waits or runs, until one is refused. Returns those that were admitted."""
    admitted: list[Future[httpx.Response]] = []
    while True:
        sent = pool.submit(ask, stack, {"input": "t10"})
        wait_until(lambda sent=sent: sent.done() or in_system(stack) > len(admitted), 10, "one more, or its refusal")
        if sent.done():
            error(sent.result(), 429)
            return admitted
        admitted.append(sent)
        assert len(admitted) <= QUEUE + BATCH, "the queue takes more than its limit"


def test_one_limit_for_singles_and_lists(stack: StandInStack, pool: ThreadPoolExecutor) -> None:
    """A limit held against single texts only, or a full queue that ends as a fault of the server."""
    stack.set_traps(batch_s=3.0)
    admitted = fill(stack, pool)
    assert stack.status()["queue"]["inputs"] == QUEUE
    for refused in ("t10", ["t10"], ["t10", "t11"]):
        answer = ask(stack, {"input": refused})
        found = error(answer, 429)
        assert (found["type"], found["code"]) == ("rate_limit_error", "queue_full")
        assert 1 <= int(answer.headers["retry-after"]) <= 30
    assert in_system(stack) == len(admitted), "nothing of what was refused waits"
    stack.set_traps(batch_s=0.001)
    assert [answer.result().status_code for answer in admitted] == [200] * len(admitted)
    wait_idle(stack)


def test_a_client_that_follows_the_hint_gets_through(stack: StandInStack, pool: ThreadPoolExecutor) -> None:
    """Refused without a hint, clients try again in lockstep, too soon, and give up."""
    stack.set_traps(batch_s=1.5)
    admitted = fill(stack, pool)
    stack.set_traps(batch_s=0.001)  # from the next batch on: the running one takes its time
    with stack.client(max_retries=2) as client:
        assert len(client.embeddings.create(model="t", input="t11").data) == 1
    assert all(answer.result().status_code == 200 for answer in admitted)
    wait_idle(stack)


def test_a_list_is_let_in_whole(stack: StandInStack) -> None:
    """Below the limit a list of any size is taken, however many inputs it has."""
    assert len(vectors(ask(stack, {"input": ["t10"] * 10 * QUEUE}))) == 10 * QUEUE


def test_inputs_of_different_lengths_share_forwards(make_standin: StandInFactory, pool: ThreadPoolExecutor) -> None:
    """Batches of one although many wait: equal lengths only, or a pool of threads that lets few in."""
    stack = make_standin("--max_batch_size=16", "--max_queue_delay=0.05", batch_s=0.5).start().wait_ready()
    before = batches(stack)
    first = pool.submit(ask, stack, {"input": "t10"})
    wait_until(lambda: in_system(stack) == 1, 10, "the first to run")
    answers = [pool.submit(ask, stack, {"input": "t10 " * (1 + number % MOST_LENGTH)}) for number in range(SINGLES - 1)]
    wait_until(lambda: in_system(stack) == SINGLES, 10, "all of them to be in the server at once")
    assert {answer.result().status_code for answer in (first, *answers)} == {200}
    wait_until(lambda: batches(stack)[0] == before[0] + SINGLES, 10, "all of them in the metrics")
    assert SINGLES / (batches(stack)[1] - before[1]) >= 8


def batches(stack: StandInStack) -> tuple[float, float]:
    """Inputs that ran, and the batches in which they did."""
    found = metrics(stack)
    return found["packhorse_batch_inputs_sum{}"], found["packhorse_batch_inputs_count{}"]
