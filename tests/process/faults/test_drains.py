"""Stops that are meant: of the server, of its workers one by one, and scaling. Nobody loses anything."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable

import pytest

from aims import Aims
from footprint import Settled
from harm import logged, queued_inputs, wait_ready_workers
from load import Load
from packhorse.control import Supervisor
from packhorse.supervise import SOCKET_NAME
from questions import random_questions
from standin_stack import StandInFactory, StandInStack
from waiting import wait_until

pytestmark = pytest.mark.process

SEED = 71
RESET = ("ConnectionResetError", "closed without an answer")


@pytest.fixture(scope="module")
def stack(make_shared_standin: StandInFactory) -> StandInStack:
    return make_shared_standin("--workers_per_device=2", batch_s=0.015).start().wait_ready(2)


def by_signal(_: StandInStack, slot: int, pid: int) -> None:
    os.kill(pid, signal.SIGTERM)


def by_supervisord(stack: StandInStack, slot: int, pid: int) -> None:
    """As ``supervisorctl restart`` does."""
    supervisor = Supervisor(f"unix://{stack.run_dir / SOCKET_NAME}")
    supervisor.stop("worker", f"worker-{slot}")
    wait_until(lambda: not supervisor.processes()[f"worker-{slot}"].pid, 10, "the worker's end")
    supervisor.start("worker", f"worker-{slot}")


@pytest.mark.parametrize("restart", [by_signal, by_supervisord])
def test_rolling_restart_of_every_worker(
    stack: StandInStack, settled: Settled, restart: Callable[[StandInStack, int, int], None]
) -> None:
    before = {worker["id"]: worker["pid"] for worker in wait_ready_workers(stack, 2)}
    with settled(stack):
        with Load(stack.port, random_questions(SEED), rate=200, seed=SEED) as load:
            load.wait_for(50)
            for slot in (0, 1):
                restart(stack, slot, before[f"worker-{slot}"])
                wait_until(lambda pid=before[f"worker-{slot}"]: pid not in _pids(stack), 10, "the old worker's end")
                wait_ready_workers(stack, 2)
                load.wait_for(50)
        report = load.report()
    print(f"seed {SEED}: {report}")
    report.assert_invariant()
    assert set(report.counts) == {200}
    assert not set(before.values()) & set(_pids(stack))


def test_scaling_up_and_down(stack: StandInStack, settled: Settled) -> None:
    with settled(stack):
        with Load(stack.port, random_questions(SEED), rate=200, seed=SEED) as load:
            for count in (4, 1, 2):
                scaled = stack.packhorse("scale", str(count), f"--run_dir={stack.run_dir}")
                assert scaled.returncode == 0, scaled.stderr
                wait_ready_workers(stack, count)
                load.wait_for(50)
        report = load.report()
    print(f"seed {SEED}: {report}")
    report.assert_invariant()
    assert set(report.counts) == {200}


@pytest.mark.parametrize("frontends", [1, 2])
def test_sigterm_under_load(make_standin: StandInFactory, aims: Aims, frontends: int) -> None:
    """What was accepted is answered; who comes later is told so while the server is there; it ends with 0."""
    stack = make_standin("--workers_per_device=2", f"--num_frontends={frontends}", "--max_batch_size=4", batch_s=0.02)
    stack.start().wait_ready(2, frontends=frontends)
    with Load(stack.port, random_questions(SEED, inputs=10), rate=100, seed=SEED) as load:
        wait_until(lambda: (queued_inputs(stack) or 0) >= 100, 30, "a queue")
        told = time.monotonic()
        assert stack.stop() == 0, stack.text()
        stopped = time.monotonic()
    report = load.report()
    print(f"seed {SEED}: {report}; stopped after {stopped - told:.2f} s")
    # Nothing that a frontend has read is lost. Of those who connect as it closes its socket, a few may see that.
    lost = report.where(lambda sent: sent.sent > told and bool(sent.problem) and sent.problem != "hung")
    report.assert_invariant(may_be_lost=lambda sent: sent in lost.sent)
    assert set(report.counts) - set(lost.counts) == {200, 503}
    assert set(lost.counts) <= {"ConnectionRefusedError", *RESET}
    accepted = report.where(lambda sent: sent.ended > told and sent.status == 200)
    assert accepted.sent, "nothing was waiting at the stop, else this test shows nothing"
    assert set(report.between(0, told - 0.2).counts) == {200}
    refused = report.of(503)
    assert {sent.code for sent in refused.sent} <= {"draining"}
    assert all(sent.headers.get(b"connection") == b"close" for sent in refused.sent)
    assert logged(stack, r"drained requests_dropped=(\d+)") == ["0"]
    aims.note("connections reset as a server that stops closes its socket", len(lost.of(*RESET).sent), "", at_most=0)
    aims.note("slowest refusal of a server that stops", 1000 * refused.slowest_s, "ms", at_most=100)


def test_all_parts_stopped_at_once_under_load(make_standin: StandInFactory) -> None:
    """``supervisorctl stop all`` signals every process without waiting for any: workers hand back what nobody will run. It is
    refused soon, not after the whole grace."""
    variables = {"PACKHORSE_WORKERS_PER_DEVICE": "2", "PACKHORSE_MAX_BATCH_SIZE": "4"}
    stack = make_standin(environment=variables, batch_s=0.02, input_s=0.02)
    stack.start_under_supervisord().wait_ready(2)
    with Load(stack.port, random_questions(SEED, inputs=10), rate=100, seed=SEED) as load:
        wait_until(lambda: (queued_inputs(stack) or 0) >= 200, 30, "a queue")
        told = time.monotonic()
        supervisorctl = [sys.executable, "-m", "supervisor.supervisorctl", "-s", f"unix://{stack.run_dir / SOCKET_NAME}"]
        subprocess.run([*supervisorctl, "stop", "all"], check=True, capture_output=True, timeout=60)
        stopped = time.monotonic()
    report = load.report()
    print(f"seed {SEED}: {report}; stopped after {stopped - told:.2f} s")
    lost = report.where(lambda sent: sent.sent > told and bool(sent.problem) and sent.problem != "hung")
    report.assert_invariant(may_be_lost=lambda sent: sent in lost.sent)
    assert set(report.counts) - set(lost.counts) == {200, 503}
    assert stopped - told < 10
    waited = report.of(503).where(lambda sent: sent.sent < told)
    assert waited.sent, "nothing waited at the stop, else this test shows nothing"
    assert {(sent.code, sent.headers.get(b"connection")) for sent in waited.sent} == {("draining", b"close")}
    assert len(logged(stack, "all workers have left")) == 1
    assert stack.stop() == 0


def _pids(stack: StandInStack) -> list[int]:
    return [process.pid for process in stack.processes("worker")]
