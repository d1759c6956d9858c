"""Clients that leave or lose patience: nobody computes for them."""

from __future__ import annotations

import asyncio
import random
import time
from collections import Counter

import httpx
import pytest

from aims import Aims
from questions import ask, random_text
from raw_http import connect
from reports.asking import in_system, wait_idle
from standin_stack import StandInFactory, StandInStack
from waiting import wait_until

pytestmark = pytest.mark.process

BATCH = 8
ITEMS = 50
PATIENCE_S = 1.0
TRIES = 4
BATCH_S = 0.2
CROWD = 32
"""Clients of one request each: four fifths of what is done within their patience."""
HICCUP_S = 1.5
EVERY_S = 8.0
FREED_WITHIN_S = 1.0
EMPTY_WITHIN_S = 3.0
"""What remains of a server's work when all clients have stopped."""


@pytest.fixture(scope="module")
def stack(make_standin: StandInFactory) -> StandInStack:
    return make_standin(f"--max_batch_size={BATCH}", batch_s=BATCH_S).start().wait_ready()


def computed(stack: StandInStack) -> int:
    """Inputs that workers have begun, the canaries included."""
    return sum(batch.inputs for batch in stack.computed())


def test_what_a_client_that_left_had_waiting_is_dropped(stack: StandInStack) -> None:
    """A client closes its connection, and the device still works through its list."""
    stack.set_traps(batch_s=1.0)
    before = computed(stack)
    with connect(stack.port) as connection:
        connection.sendall(ask([f"t20 t{30 + number}" for number in range(ITEMS)]).wire)
        wait_until(lambda: computed(stack) > before and in_system(stack) == ITEMS, 10, "its first batch to run")
        begun = computed(stack)
    stack.set_traps(batch_s=0.01)
    wait_until(lambda: stack.status()["queue"]["inputs"] == 0, FREED_WITHIN_S, "an empty queue")
    wait_idle(stack)
    assert computed(stack) - begun <= BATCH


async def impatient(http: httpx.AsyncClient, until: float, outcomes: Counter[str], number: int) -> None:
    """A client that gives an answer a second, tries four times, and then goes on to its next text."""
    source = random.Random(number)
    while time.monotonic() < until:
        body = {"input": random_text(source, 5)}
        for _ in range(TRIES):
            outcomes["sent"] += 1
            try:
                answer = await http.post("/v1/embeddings", json=body)
            except httpx.TimeoutException:
                outcomes["timeout"] += 1
                continue
            outcomes[str(answer.status_code)] += 1
            if answer.status_code == 200:
                break
            await asyncio.sleep(PATIENCE_S)


async def crowd(stack: StandInStack, seconds: float) -> Counter[str]:
    """So many clients that most answers come in time, and now and then a batch for which all of them lose patience."""
    outcomes: Counter[str] = Counter()
    limits = httpx.Limits(max_connections=CROWD, max_keepalive_connections=CROWD)
    until = time.monotonic() + seconds
    async with httpx.AsyncClient(base_url=stack.url, timeout=PATIENCE_S, limits=limits) as http:
        clients = asyncio.gather(*(impatient(http, until, outcomes, number) for number in range(CROWD)))
        while time.monotonic() < until - HICCUP_S:
            await asyncio.sleep(2 * BATCH_S)
            stack.set_traps(batch_s=HICCUP_S)
            await asyncio.sleep(2 * BATCH_S)  # one batch begins meanwhile; it is over only later
            stack.set_traps(batch_s=BATCH_S)
            await asyncio.sleep(EVERY_S)
        await clients
    return outcomes


@pytest.mark.timeout(200)
def test_clients_that_try_again_do_not_pile_up_dead_work(stack: StandInStack, soak: bool, aims: Aims) -> None:
    """Each time-out leaves a dead copy of its request behind, which is computed all the same: load grows with load."""
    stack.set_traps(batch_s=BATCH_S)
    before = computed(stack)
    outcomes = asyncio.run(crowd(stack, 60.0 if soak else 6.0))
    ended = time.monotonic()
    wait_idle(stack, EMPTY_WITHIN_S)
    done = computed(stack) - before
    unread = (done - outcomes["200"]) / done
    print(f"{dict(outcomes)}; {done} computed, empty {time.monotonic() - ended:.2f} s after the last client")
    assert outcomes["timeout"] >= BATCH, "nobody lost patience, else this test shows nothing"
    assert unread <= 0.5
    aims.note("computed for clients that had left", 100 * unread, "%", at_most=10)
