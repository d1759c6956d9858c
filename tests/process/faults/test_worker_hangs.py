"""Workers that stop without dying: stopped by a signal, or stuck in a batch."""

from __future__ import annotations

import time

import pytest

from aims import Aims
from footprint import Settled
from harm import busy_worker, logged, ready_workers, stopped, wait_ready_workers
from load import Load
from questions import ask, ids_of, random_questions
from standin_stack import StandInFactory
from waiting import wait_until

pytestmark = pytest.mark.process

SEED = 43
STOPPED_S = 3.0
STUCK = 95


def test_a_worker_stopped_for_3_s(make_standin: StandInFactory, settled: Settled, aims: Aims) -> None:
    """Its work is moved after a second of silence; its late answers are ignored; it comes back as the same process."""
    stack = make_standin("--workers_per_device=2", batch_s=0.015).start().wait_ready(2)
    with settled(stack):
        with Load(stack.port, random_questions(SEED), rate=200, seed=SEED) as load:
            load.wait_for(50)
            began = time.monotonic()
            load.wait_for(200)
            pid, stopped_at = busy_worker(stack, 0), time.monotonic()
            with stopped(pid):
                time.sleep(STOPPED_S)  # the fault
            wait_ready_workers(stack, 2)
            back = time.monotonic()
            wait_until(lambda: any(each.pid == pid and each.began > back for each in stack.computed()), 10, "work for it again")
            load.wait_for(50)
        report = load.report()
    print(f"seed {SEED}: {report}")
    report.assert_invariant()
    assert set(report.counts) == {200}
    assert pid in [worker["pid"] for worker in ready_workers(stack)]
    assert logged(stack, r"worker silent for (\S+) s: its work is moved worker=worker-0")
    normal = report.within(began, stopped_at)
    aims.note("slowest above normal, worker stopped for 3 s", report.slowest_s - normal.slowest_s, "s", at_most=1.5)


def test_a_batch_that_never_returns(make_standin: StandInFactory, settled: Settled, aims: Aims) -> None:
    """Its worker is killed at the deadline, until the input that is to blame stands alone."""
    batch_timeout_s = 1.0
    stack = make_standin(f"--batch_timeout={batch_timeout_s:g}", "--workers_per_device=3", batch_s=0.015, hang=(STUCK,))
    stack.start().wait_ready(3)
    with settled(stack):
        with (
            Load(stack.port, random_questions(SEED), rate=100, seed=SEED) as load,
            Load(stack.port, [ask([f"t{STUCK} t10"])], rate=1, at_most=1) as guilty,
        ):
            found = guilty.wait_done(within_s=30)
            wait_ready_workers(stack, 3)
            load.wait_for(50)
        report = load.report()
    print(f"seed {SEED}: {report}")
    found.assert_invariant()
    assert dict(found.counts) == {500: 1}
    assert found.sent[0].code == "worker_died"
    report.assert_invariant()
    assert set(report.counts) == {200}
    stuck = [batch for batch in stack.computed() if ids_of(f"t{STUCK} t10") in batch.ids]
    assert len(stuck) == 3
    assert len(stuck[-1].ids) == 1
    assert len(logged(stack, r"worker killed: a batch runs for over .*batch_timeout")) == 3
    # Three deadlines, each with a reload at worst.
    aims.note("a stuck input found, batch_timeout 1 s", found.slowest_s, "s", at_most=3 * (batch_timeout_s + 1.0))
