"""One of two frontends is killed with a long queue: its work is freed, the other's clients notice nothing."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import pytest

from footprint import Settled
from harm import kill, logged, queued_inputs
from load import Load
from questions import random_questions
from standin_stack import StandInFactory, StandInStack
from waiting import wait_until

pytestmark = pytest.mark.process

SEED = 53
DOOMED = 12
INPUTS = 100
"""Inputs of each of the doomed requests: 1,200 in all."""


def test_a_killed_frontends_queue_is_freed(make_standin: StandInFactory, settled: Settled) -> None:
    stack = make_standin("--num_frontends=2", "--max_batch_size=8", batch_s=0.05).start().wait_ready(1, frontends=2)
    doomed = random_questions(SEED, DOOMED, inputs=INPUTS, longest=5)
    others = random_questions(SEED + 1, longest=5)
    with settled(stack), connections(stack, DOOMED) as (victim, to_victim):
        with Load(stack.port, others, clients=4, seed=SEED) as load:
            load.wait_for(20)
            for connection, question in zip(to_victim, doomed, strict=True):
                connection.sendall(question.wire)
            wait_until(lambda: stack.status()["queue"]["inputs"] > 0.8 * DOOMED * INPUTS, 10, "a long queue")
            its_ports = {each.raddr.port for each in victim.net_connections() if each.raddr}
            kill(victim.pid)
            wait_until(lambda: (left := queued_inputs(stack)) is not None and left < INPUTS, 5, "its inputs to be dropped")
            dropped = logged(stack, r"frontend left: its process ended .* requests_dropped=(\d+)")
            wait_until(lambda: len(stack.processes("frontend")) == 2, 10, "its successor")
            load.wait_for(40)
        report = load.report()
    print(f"seed {SEED}: {report}; ports {its_ports}")
    assert int(dropped[-1]) >= 0.8 * DOOMED
    # A client of the killed process loses the one request that it had open there; nobody loses more.
    report.assert_invariant(may_be_lost=lambda sent: sent.local_port in its_ports)
    assert set(report.where(lambda sent: sent.local_port not in its_ports).counts) == {200}
    assert report.counts[200] >= len(report.sent) - 4
    computed = sum(batch.inputs for batch in stack.computed())
    assert computed < 0.5 * DOOMED * INPUTS + len(report.sent)


@contextmanager
def connections(stack: StandInStack, count: int) -> Iterator[tuple[psutil.Process, list[socket.socket]]]:
    """One of the frontends, and so many connections to it: the kernel deals them out at random."""
    opened = [socket.create_connection(("127.0.0.1", stack.port)) for _ in range(8 * count)]
    try:
        for frontend in stack.processes("frontend"):
            ports = {each.raddr.port for each in frontend.net_connections() if each.raddr}
            its_own = [each for each in opened if each.getsockname()[1] in ports]
            if len(its_own) >= count:
                break
        assert len(its_own) >= count, "no frontend got enough connections"
        yield frontend, its_own[:count]
    finally:
        for each in opened:
            each.close()
