"""Ten times more requests than the workers can take: what is accepted goes through as ever, the rest is refused at once."""

from __future__ import annotations

import time
from dataclasses import dataclass

import pytest

from aims import Aims
from footprint import Settled
from load import Load
from questions import random_questions
from report import Report
from standin_stack import StandInFactory, StandInStack
from waiting import wait_until

pytestmark = pytest.mark.process

SEED = 61
BATCH = 8
OVERLOAD = 10
RAMP_S = 1.0
"""Until the queue is full."""


@dataclass(frozen=True)
class Size:
    """How large an overload this machine is asked to bear: a small one where others use it too."""

    batch_s: float
    seconds: float

    @property
    def capacity(self) -> float:
        """Inputs per second that the one worker computes."""
        return BATCH / self.batch_s


@pytest.fixture
def size(request: pytest.FixtureRequest) -> Size:
    """With --aims 1,000 requests a second for 20 s, else 200 for 4 s."""
    return Size(0.08, 20.0) if request.config.getoption("--aims") else Size(0.4, 4.0)


def overload(stack: StandInStack, size: Size) -> tuple[Report, Report]:
    """All of a load of singles, and what was sent when the queue was full already. Before it a few full batches run: while none
    was seen, nobody can tell how long the wait is."""
    with Load(stack.port, random_questions(SEED), clients=3 * BATCH, at_most=6 * BATCH) as load:
        load.wait_done()
    with Load(stack.port, random_questions(SEED), rate=OVERLOAD * size.capacity, seed=SEED) as load:
        began = time.monotonic()
        over = began + RAMP_S + size.seconds
        wait_until(lambda: time.monotonic() > over, RAMP_S + size.seconds + 5)  # the fault lasts so long
    report = load.report()
    steady = report.within(began + RAMP_S, over)
    print(f"seed {SEED}: {report}\nfull: {steady}")
    return report, steady


def goodput(report: Report, steady: Report, size: Size) -> float:
    """Answers with vectors per second while the overload lasted, as a share of what the worker can do."""
    start, end = steady.sent[0].sent, steady.sent[-1].sent
    done = sum(start <= each.ended < end for each in report.of(200).sent)
    return done / (end - start) / size.capacity


def test_ten_times_too_much(make_standin: StandInFactory, settled: Settled, aims: Aims, size: Size) -> None:
    limit = round(size.capacity)
    stack = make_standin(f"--max_batch_size={BATCH}", f"--max_queue_size={limit}", batch_s=size.batch_s, logs_ids=False)
    stack.start().wait_ready()
    with settled(stack):
        report, steady = overload(stack, size)
    report.assert_invariant()
    assert set(report.counts) == {200, 429}
    assert {each.code for each in steady.of(429).sent} == {"queue_full"}
    assert len(steady.of(429).sent) > 0.7 * len(steady.sent)
    aims.note("goodput at 10x overload", goodput(report, steady, size), "of capacity", at_least=0.95)
    aims.note("429, 99th percentile", 1000 * steady.of(429).percentile_s(99), "ms", at_most=5)
    longest_s = limit / size.capacity + 3 * size.batch_s
    aims.note("200, 99th percentile", steady.of(200).percentile_s(99), "s", at_most=longest_s)


def test_a_wait_beyond_the_timeout_is_refused(make_standin: StandInFactory, settled: Settled, aims: Aims, size: Size) -> None:
    """With a queue that never fills, the estimated wait decides: who is let in has its answer in time."""
    timeout_s = 3.0
    flags = ("--max_queue_size=100000", f"--request_timeout={timeout_s:g}")
    stack = make_standin(f"--max_batch_size={BATCH}", *flags, batch_s=size.batch_s, logs_ids=False)
    stack.start().wait_ready()
    with settled(stack):
        report, steady = overload(stack, size)
    report.assert_invariant(timeout_s)
    assert set(report.counts) <= {200, 429, 504}
    assert {each.code for each in steady.of(429).sent} == {"wait_too_long"}
    assert len(steady.of(429).sent) > 0.7 * len(steady.sent)
    accepted = len(steady.of(200, 504).sent)
    aims.note("accepted, but not done in time", 100 * len(steady.of(504).sent) / accepted, "%", at_most=5)
    aims.note("goodput at 10x overload by estimate", goodput(report, steady, size), "of capacity", at_least=0.95)
    aims.note("429 by estimate, 99th percentile", 1000 * steady.of(429).percentile_s(99), "ms", at_most=5)
