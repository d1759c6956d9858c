"""Clients that leave at random moments: what they had in the queue is never computed, and nobody else notices.

An end of sending (``shutdown(SHUT_WR)``) counts as leaving, as with nginx, hyper and uvicorn: it is all that a server sees of a
client that closed its connection, and to wait for more would be to compute for nobody.
"""

from __future__ import annotations

import heapq
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import pytest

from footprint import Settled
from http_answers import AnswerReader
from load import Load
from questions import Question, ask, ids_of, random_questions
from raw_http import connect, read_to_end, reset
from standin_stack import StandInFactory, StandInStack
from waiting import wait_until

pytestmark = pytest.mark.process

SEED = 83
BATCH = 8
BATCH_S = 0.03
INPUTS = 6
CLIENTS = 120
LEAVE_SHARE = 0.3
FREED_WITHIN_S = 1.0
_WORDS = range(20, 90)


def half_close(connection: socket.socket) -> None:
    connection.shutdown(socket.SHUT_WR)


WAYS: tuple[Callable[[socket.socket], None], ...] = (socket.socket.close, reset, half_close)


@dataclass(eq=False)
class Client:
    """One client and its request, whose inputs nobody else asks for."""

    number: int
    texts: list[str]
    leaves_after_s: float | None
    leave: Callable[[socket.socket], None]
    sends: float
    """How much of its request it sends: 1 is all."""
    connection: socket.socket | None = None
    left_at: float = 0.0
    question: Question = field(init=False)

    def __post_init__(self) -> None:
        self.question = ask(self.texts)

    def begin(self, port: int) -> None:
        self.connection = connect(port)
        wire = self.question.wire
        self.connection.sendall(wire[: int(self.sends * len(wire))])

    def go(self) -> None:
        assert self.connection is not None
        self.left_at = time.monotonic()
        self.leave(self.connection)


@pytest.fixture(scope="module")
def stack(make_shared_standin: StandInFactory) -> StandInStack:
    """A worker that takes 30 ms for a batch of 8: what is asked at once waits for seconds."""
    stack = make_shared_standin(f"--max_batch_size={BATCH}", "--request_timeout=30", batch_s=BATCH_S)
    stack.start().wait_ready()
    return stack


def is_idle(stack: StandInStack) -> bool:
    status = stack.status()
    is_empty = status["queue"]["inputs"] == status["queue"]["requests"] == 0
    return is_empty and not any(worker["in_flight"] for worker in status["workers"])


def own_texts(number: int) -> list[str]:
    """Inputs that no other client has: digits of their number as words."""
    return [f"t{_WORDS[number // 70]} t{_WORDS[number % 70]} t{_WORDS[index]} t{10 + number % 10}" for index in range(INPUTS)]


def make_clients(source: random.Random) -> list[Client]:
    """Among those who leave, some do before their request is sent, most while it waits or runs, some about when it ends."""
    longest_s = CLIENTS * INPUTS / BATCH * BATCH_S
    clients = []
    for number in range(CLIENTS):
        leaves_after_s = source.uniform(0, 0.9 * longest_s) if source.random() < LEAVE_SHARE else None
        sends = source.random() if leaves_after_s is not None and source.random() < 0.2 else 1.0
        clients.append(Client(number, own_texts(number), leaves_after_s, source.choice(WAYS), sends))
    return clients


def run(port: int, clients: Sequence[Client]) -> None:
    """All ask within the first half second; each leaves at its moment. Returns when the last one has left."""
    began = time.monotonic()
    events: list[tuple[float, int, Callable[[], None]]] = []
    for client in clients:
        at = began + 0.5 * client.number / len(clients)
        events.append((at, client.number, lambda client=client: client.begin(port)))
        if client.leaves_after_s is not None:
            events.append((at + client.leaves_after_s, client.number, client.go))
    heapq.heapify(events)
    while events:
        due, _, act = heapq.heappop(events)
        time.sleep(max(0.0, due - time.monotonic()))  # the fault is when they leave
        act()


def test_thirty_percent_leave_at_random(stack: StandInStack, settled: Settled) -> None:
    clients = make_clients(random.Random(SEED))
    leaving = [client for client in clients if client.leaves_after_s is not None]
    with settled(stack), closed_at_end(clients):
        with Load(stack.port, random_questions(SEED, longest=3), rate=10, seed=SEED) as load:
            load.wait_for(5)
            run(stack.port, clients)
            for client in clients:
                if client not in leaving:
                    assert_answered(client)
        report = load.report()
    print(f"seed {SEED}: {len(leaving)} of {len(clients)} left; others: {report}")
    report.assert_invariant(timeout_s=30)
    assert set(report.counts) == {200}
    waiting, computed = count_waiting_and_computed(stack, leaving)
    print(f"of {waiting} inputs that waited when their client left, {computed} were computed")
    assert waiting > 0.3 * len(leaving) * INPUTS, "too few left in time for this to say anything"
    assert computed <= 0.1 * waiting


def assert_answered(client: Client) -> None:
    assert client.connection is not None
    reader = AnswerReader()
    while (answer := reader.take()) is None:
        received = client.connection.recv(1 << 16)
        assert received, f"client {client.number} was cut off"
        reader.feed(received)
    assert answer.status == 200, answer
    assert client.question.is_answered_by(answer.body), client.number


@contextmanager
def closed_at_end(clients: Sequence[Client]) -> Iterator[None]:
    try:
        yield
    finally:
        for client in clients:
            if client.connection is not None:
                client.connection.close()


def count_waiting_and_computed(stack: StandInStack, leaving: Sequence[Client]) -> tuple[int, int]:
    """Inputs that no worker had begun when their client left, and how many of these were computed all the same."""
    began: dict[tuple[int, ...], float] = {}
    for batch in stack.computed():
        for ids in batch.ids:
            began.setdefault(tuple(ids), batch.began)
    waiting = computed = 0
    for client in leaving:
        if client.sends < 1:
            continue
        for text in client.texts:
            moment = began.get(tuple(ids_of(text)))
            if moment is None or moment > client.left_at:
                waiting += 1
                computed += moment is not None
    return waiting, computed


@pytest.mark.parametrize("leave", WAYS)
def test_a_full_queue_leaves_at_once(stack: StandInStack, settled: Settled, leave: Callable[[socket.socket], None]) -> None:
    """Within a second nothing waits and nothing runs, and from then on nothing more is computed."""
    clients = [Client(number, own_texts(number), 0.0, leave, 1.0) for number in range(60)]
    before = computed_inputs(stack)
    with settled(stack), closed_at_end(clients):
        for client in clients:
            client.begin(stack.port)
        wait_until(lambda: stack.status()["queue"]["requests"] >= 50, 5, "the queue to fill")
        for client in clients:
            client.go()
        wait_until(lambda: is_idle(stack), FREED_WITHIN_S, "an empty queue and no batch")
        computed = computed_inputs(stack)
        assert computed - before < 0.5 * len(clients) * INPUTS
        assert stack.computed()[-1].began < clients[-1].left_at + 3 * BATCH_S
        if leave is half_close:
            endings = [read_to_end(client.connection) for client in clients if client.connection is not None]
            assert all(ending.is_closed for ending in endings)
            assert sum(not ending.answers for ending in endings) >= 50
        with Load(stack.port, [ask(["t10 t11"])], clients=1, at_most=3) as load:
            assert set(load.wait_done().counts) == {200}
    assert computed_inputs(stack) == computed + 3


def computed_inputs(stack: StandInStack) -> int:
    """As the broker counts them, and as the stand-in noted them; but for the canary these must be the same."""
    noted = sum(batch.inputs for batch in stack.computed())
    counted = sum(int(worker["inputs"]) for worker in stack.workers("ready", "busy"))
    assert noted - 2 <= counted <= noted
    return counted
