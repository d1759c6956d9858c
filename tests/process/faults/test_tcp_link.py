"""The link between the broker and a worker of another machine, beside a local one: it stalls, is cut, comes late, or never."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from aims import Aims
from footprint import Settled
from harm import kill, logged, ready_workers, wait_ready_workers
from load import Load
from questions import random_questions
from remote_machine import RemoteMachine
from standin_stack import StandInFactory, StandInStack
from tcp_proxy import TcpProxy
from waiting import wait_until

pytestmark = pytest.mark.process

SEED = 59
BATCH_S = 0.015
RATE = 200
STALL_S = 4.0


@pytest.fixture
def machine() -> Iterator[RemoteMachine]:
    with RemoteMachine() as made:
        yield made


@pytest.fixture
def link(machine: RemoteMachine) -> Iterator[TcpProxy]:
    with TcpProxy(machine.port) as made:
        yield made


def start_stack(make_standin: StandInFactory, machine: RemoteMachine, *flags: str) -> StandInStack:
    """With one local worker."""
    return make_standin(*machine.server_flags, *flags, batch_s=BATCH_S).start().wait_ready(1)


def is_busy(stack: StandInStack, name: str) -> bool:
    return any(worker["id"] == name and worker["in_flight"] for worker in ready_workers(stack))


def begun(stack: StandInStack, pid: int, since: float = 0.0) -> int:
    """Batches that a worker has begun."""
    return sum(each.pid == pid and each.began > since for each in stack.computed())


def test_a_link_that_stalls_for_4_s(
    make_standin: StandInFactory, machine: RemoteMachine, link: TcpProxy, settled: Settled, aims: Aims
) -> None:
    """As a worker that is stopped: its work is moved after a second, its late answers are ignored, it comes back."""
    stack = start_stack(make_standin, machine)
    worker = machine.start_worker(stack, port=link.port)
    wait_ready_workers(stack, 2)
    with settled(stack):
        with Load(stack.port, random_questions(SEED), rate=RATE, seed=SEED) as load:
            load.wait_for(50)
            began = time.monotonic()
            load.wait_for(2 * RATE)
            wait_until(lambda: is_busy(stack, machine.name_of(worker)), 30)
            stalled_at = time.monotonic()
            with link.stalled():
                time.sleep(STALL_S)  # the fault
            wait_ready_workers(stack, 2)
            back = time.monotonic()
            wait_until(lambda: begun(stack, worker.pid, since=back), 10, "work for it again")
            load.wait_for(50)
        report = load.report()
    print(f"seed {SEED}: {report}")
    report.assert_invariant()
    assert set(report.counts) == {200}
    assert worker.poll() is None
    assert link.accepted == 2, "one connection for the settings, one for the worker: none was made anew"
    assert logged(stack, rf"worker silent for (\S+) s: its work is moved worker={machine.name_of(worker)}")
    assert logged(stack, rf"worker is back worker={machine.name_of(worker)}")
    normal = report.within(began, stalled_at)
    aims.note("slowest above normal, link stalled for 4 s", report.slowest_s - normal.slowest_s, "s", at_most=1.5)


def test_a_link_that_stalls_for_longer_than_worker_timeout(
    make_standin: StandInFactory, machine: RemoteMachine, link: TcpProxy, settled: Settled
) -> None:
    """The worker cannot be killed: it is told to end itself, as soon as it can be told anything."""
    stack = start_stack(make_standin, machine, "--worker_timeout=2")
    worker = machine.start_worker(stack, port=link.port)
    wait_ready_workers(stack, 2)
    with settled(stack):
        with Load(stack.port, random_questions(SEED), rate=RATE, seed=SEED) as load:
            load.wait_for(50)
            with link.stalled():
                wait_until(lambda: logged(stack, r"worker told to end itself: silent for"), 10)
            assert worker.wait(10) == 1
            load.wait_for(50)
        report = load.report()
    print(f"seed {SEED}: {report}")
    report.assert_invariant()
    assert set(report.counts) == {200}
    assert "the broker gave this worker up, ending at once: silent for" in machine.log()


def test_a_link_that_is_cut_again_and_again(
    make_standin: StandInFactory, machine: RemoteMachine, link: TcpProxy, settled: Settled, aims: Aims
) -> None:
    """What was on its way is gone, in both directions; the worker connects again, and stays the same process."""
    stack = start_stack(make_standin, machine)
    worker = machine.start_worker(stack, port=link.port)
    wait_ready_workers(stack, 2)
    with settled(stack):
        with Load(stack.port, random_questions(SEED), rate=RATE, seed=SEED) as load:
            load.wait_for(50)
            began = time.monotonic()
            load.wait_for(2 * RATE)
            first_cut = time.monotonic()
            for _ in range(8):
                wait_until(lambda: is_busy(stack, machine.name_of(worker)), 30, "the worker to be busy")
                link.cut()
                cut_at = time.monotonic()
                wait_until(lambda at=cut_at: begun(stack, worker.pid, since=at), 30, "work for it again")  # type: ignore[misc]
            load.wait_for(50)
        report = load.report()
    print(f"seed {SEED}: {report}")
    report.assert_invariant()
    assert set(report.counts) == {200}
    assert worker.poll() is None
    assert [each["id"] for each in wait_ready_workers(stack, 2)] == ["worker-0", machine.name_of(worker)]
    normal = report.within(began, first_cut)
    aims.note("slowest above normal, link cut 8 times", report.slowest_s - normal.slowest_s, "s", at_most=2.5)


def test_a_remote_worker_that_is_killed(
    make_standin: StandInFactory, machine: RemoteMachine, settled: Settled, aims: Aims
) -> None:
    """Nobody here sees its process end: only its silence tells, or the link that closes."""
    stack = start_stack(make_standin, machine)
    worker = machine.start_worker(stack)
    wait_ready_workers(stack, 2)
    with settled(stack):
        with Load(stack.port, random_questions(SEED), rate=RATE, seed=SEED) as load:
            load.wait_for(50)
            began = time.monotonic()
            load.wait_for(2 * RATE)
            wait_until(lambda: is_busy(stack, machine.name_of(worker)), 30)
            killed_at = time.monotonic()
            kill(worker.pid)
            worker.wait()
            another = machine.start_worker(stack)
            wait_until(lambda: begun(stack, another.pid), 30, "work for its successor")
            load.wait_for(50)
        report = load.report()
    print(f"seed {SEED}: {report}")
    report.assert_invariant()
    assert set(report.counts) == {200}
    normal = report.within(began, killed_at)
    aims.note("slowest above normal, remote worker killed", report.slowest_s - normal.slowest_s, "s", at_most=1.5)


def test_a_link_that_comes_late_or_never(make_standin: StandInFactory, machine: RemoteMachine, settled: Settled) -> None:
    """A worker waits half a minute for its broker and then says so; the server does not notice. Something takes the connections
    here, with no broker behind it."""
    stack = start_stack(make_standin, machine)
    with TcpProxy(0) as nowhere, TcpProxy(machine.port) as link, settled(stack):
        with Load(stack.port, random_questions(SEED), rate=50, seed=SEED) as load:
            never = machine.start_worker(stack, port=nowhere.port)
            with link.answering(b"HTTP/1.1 502 Bad Gateway\r\n\r\n"):
                late = machine.start_worker(stack, port=link.port)
                wait_until(lambda: link.accepted and nowhere.accepted, 30)
            wait_ready_workers(stack, 2)
            assert never.wait(45) == 3
        report = load.report()
        late.terminate()
        assert late.wait(10) == 0
    report.assert_invariant()
    assert set(report.counts) == {200}
    errors = [line for line in machine.log().splitlines() if line.startswith("packhorse worker: ")]
    assert len(errors) == 1
    assert f"what listens at tcp://127.0.0.1:{nowhere.port} does not show that" in errors[0]
    assert "(tried 30 s)" in errors[0]


def test_sigterm_to_worker_and_server_under_load(
    make_standin: StandInFactory, machine: RemoteMachine, settled: Settled
) -> None:
    stack = start_stack(make_standin, machine)
    workers: list[subprocess.Popen[bytes]] = [machine.start_worker(stack) for _ in range(2)]
    wait_ready_workers(stack, 3)
    with settled(stack):
        with Load(stack.port, random_questions(SEED), rate=RATE, seed=SEED) as load:
            load.wait_for(RATE)
            workers[0].terminate()
            assert workers[0].wait(10) == 0
            load.wait_for(50)
        report = load.report()
    report.assert_invariant()
    assert set(report.counts) == {200}
    assert stack.stop() == 0
    assert workers[1].wait(10) == 0, "the server told it"
