"""Workers are killed while they compute: no request may notice but by a little more time."""

from __future__ import annotations

import time

import pytest

from aims import Aims
from footprint import Settled
from harm import busy_worker, kill, kill_and_replace, logged, wait_ready_workers
from load import Load
from questions import random_questions
from standin_stack import StandInFactory, StandInStack
from waiting import wait_until

pytestmark = pytest.mark.process

SEED = 41
BATCH_S = 0.015


@pytest.fixture(scope="module")
def stack(make_shared_standin: StandInFactory) -> StandInStack:
    return make_shared_standin("--workers_per_device=2", batch_s=BATCH_S).start().wait_ready(2)


def test_three_kills_at_300_requests_a_second(stack: StandInStack, settled: Settled, aims: Aims) -> None:
    stack.forget_deaths()
    with settled(stack):
        with Load(stack.port, random_questions(SEED), rate=300, seed=SEED) as load:
            load.wait_for(100)
            began = time.monotonic()
            load.wait_for(450)
            first_kill = time.monotonic()
            for slot in (0, 1, 0):
                kill_and_replace(stack, busy_worker(stack, slot), 2)
                load.wait_for(100)
        report = load.report()
    print(f"seed {SEED}: {report}")
    report.assert_invariant()
    assert set(report.counts) == {200}
    assert any(int(moved) > 0 for moved in logged(stack, r"worker lost: .* inputs_moved=(\d+)")[-3:]), "no batch was hit"
    normal, after = report.within(began, first_kill), report.where(lambda each: each.ended >= first_kill)
    aims.note("slowest above normal, 3 kills", 1000 * (after.slowest_s - normal.slowest_s), "ms", at_most=100)
    aims.note("the client's own lag", 1000 * report.lag_s, "ms")


def test_all_workers_killed(stack: StandInStack, settled: Settled, aims: Aims) -> None:
    """What was accepted waits for the reload; who comes meanwhile is told at once to come back."""
    stack.forget_deaths()
    stack.set_traps(load_s=0.7)
    with settled(stack):
        with Load(stack.port, random_questions(SEED, inputs=3), rate=150, seed=SEED) as load:
            load.wait_for(150)
            victims = [busy_worker(stack, slot) for slot in (0, 1)]
            killed = time.monotonic()
            for pid in victims:
                kill(pid)
            wait_until(lambda: load.report().of(503).sent, 10, "a refusal")
            wait_ready_workers(stack, 2)
            again = time.monotonic()
            load.wait_for(100)
        report = load.report()
    stack.set_traps(load_s=0.0)
    print(f"seed {SEED}: {report}")
    report.assert_invariant()
    assert set(report.counts) == {200, 503}
    assert set(report.within(0, killed).counts) == {200}
    assert set(report.between(again, float("inf")).counts) == {200}
    refused = report.of(503)
    assert {each.code for each in refused.sent} <= {"no_worker", "loading"}
    waited = report.where(lambda each: each.status == 200 and each.sent < killed and each.ended > killed + 0.7)
    assert waited.sent, "no accepted request waited for the reload, else this test shows nothing"
    aims.note("slowest refusal without a worker", 1000 * refused.slowest_s, "ms", at_most=100)
