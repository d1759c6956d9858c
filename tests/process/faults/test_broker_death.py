"""The broker is killed under load: its successor gets everything back, and nobody waits longer than its start takes."""

from __future__ import annotations

import time

import pytest

from aims import Aims
from footprint import Settled
from harm import kill, log_of, ready_workers, wait_ready_workers
from load import Load
from questions import random_questions
from standin_stack import StandInFactory
from waiting import wait_until

pytestmark = pytest.mark.process

SEED = 47
LISTENS = "broker listens"


def test_kill_and_restart_under_load(make_standin: StandInFactory, settled: Settled, aims: Aims) -> None:
    stack = make_standin("--workers_per_device=2", "--num_frontends=2", batch_s=0.015).start().wait_ready(2, frontends=2)
    pids = [worker["pid"] for worker in ready_workers(stack)]
    with settled(stack):
        with Load(stack.port, random_questions(SEED, inputs=2), rate=200, seed=SEED) as load:
            load.wait_for(200)
            starts = log_of(stack).count(LISTENS)
            broker = stack.processes("broker")[0].pid
            killed = time.monotonic()
            kill(broker)
            wait_until(lambda: log_of(stack).count(LISTENS) > starts, 20, "the next broker")
            listens = time.monotonic()
            wait_until(lambda: any(each.ended > listens for each in load.report().of(200).sent), 20, "an answer after it")
            load.wait_for(200)
            wait_ready_workers(stack, 2)
        report = load.report()
    print(f"seed {SEED}: {report}; restart {listens - killed:.2f} s")
    report.assert_invariant()
    assert set(report.counts) <= {200, 503}
    assert set(report.within(0, killed).counts) == {200}
    assert [worker["pid"] for worker in ready_workers(stack)] == pids, "the workers should live on"
    ends = [each.ended for each in report.of(200).sent]
    gap = min(end for end in ends if end > listens) - max(end for end in ends if end <= listens)
    aims.note("gap without answers beyond the broker's restart", gap - (listens - killed), "s", at_most=0.3)
    aims.note("the broker's restart", listens - killed, "s")
    open_then = report.where(lambda each: each.sent < killed < each.ended)
    print(f"open at the kill: {open_then}")
    assert set(open_then.counts) <= {200}, "open requests are submitted again"
