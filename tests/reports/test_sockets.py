"""The sockets between the processes: what is slow, gone, left over or idle there."""

from __future__ import annotations

import resource
import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import psutil
import pytest

from harm import kill, log_of, stopped
from load import Load
from questions import random_questions
from reports.asking import in_system, wait_idle
from standin import DIMENSION
from standin_stack import StandInFactory, StandInStack
from waiting import wait_until

pytestmark = pytest.mark.process

SEED = 80
VALUES = 2048
STOPPED_S = 3.0
IDLE_SHARE = 0.02
"""Of a core: what a process may take that has nothing to do."""


@pytest.fixture
def many_files() -> Iterator[None]:
    """So many connections as the machine allows, for the clients of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("many_files")
def test_answers_for_a_frontend_that_does_not_run_wait_for_it(make_standin: StandInFactory, soak: bool) -> None:
    """A socket drops messages in silence when its other end is slow, and whoever asked waits for ever."""
    requests = 3000 if soak else 800
    stack = make_standin("--max_queue_size=4000", "--max_batch_size=64", dimension=VALUES, logs_ids=False, batch_s=0.5)
    stack.start().wait_ready()
    questions = [replace(each, rows=np.tile(each.rows, VALUES // DIMENSION)) for each in random_questions(SEED, 200, longest=3)]
    (frontend,) = stack.processes("frontend")
    with Load(stack.port, questions, clients=requests, at_most=requests, seed=SEED) as load:
        wait_until(lambda: in_system(stack) > 0.9 * requests or load.answered > requests / 10, 60, "most to be in the server")
        with stopped(frontend.pid):
            stack.set_traps(batch_s=0.001)
            until = time.monotonic() + STOPPED_S
            wait_until(lambda: time.monotonic() > until, STOPPED_S + 1)  # the fault lasts so long
        report = load.wait_done()
    print(f"seed {SEED}: {report}")
    report.assert_invariant()
    assert set(report.counts) <= {200, 429}
    assert report.counts[200] > requests / 2
    wait_idle(stack)


@pytest.mark.timeout(600)
def test_processes_come_up_every_time(make_standin: StandInFactory, soak: bool) -> None:
    """Processes forked with a socket's threads half alive: a start in thirty hangs, or dies of an assertion."""
    stack = make_standin("--workers_per_device=4")
    for _ in range(30 if soak else 2):
        stack.start().wait_ready(4)
        workers = stack.processes("worker")
        assert len(workers) == 4
        starter = workers[0].parent()
        assert starter is not None
        assert any("supervisord" in word for word in starter.cmdline()), "they are started with exec, by a process without zmq"
        assert not any("libzmq" in region.path for region in starter.memory_maps())
        assert stack.stop() == 0, stack.text()
    for part in ("broker", "frontend-0", *(f"worker-{slot}" for slot in range(4))):
        assert "Assertion" not in log_of(stack, part)
        assert "Traceback" not in log_of(stack, part)


@pytest.mark.parametrize("name", ["frontends.ipc", "workers.ipc"])
def test_a_file_in_the_place_of_a_socket_is_kept(make_standin: StandInFactory, name: str) -> None:
    """What stands where a socket must be is removed without a word, or the start fails without a reason."""
    stack = make_standin()
    kept = stack.run_dir / name
    kept.write_text("mine")
    assert stack.start().process is not None
    assert stack.process.wait(60) == 1
    assert str(kept) in stack.text().splitlines()[-1]
    assert "in the way" in stack.text()
    assert kept.read_text() == "mine"


@pytest.mark.timeout(200)
def test_nobody_spins_when_a_worker_is_gone(make_standin: StandInFactory, soak: bool) -> None:
    """A poll loop that a lost peer, or nothing at all, wakes again and again takes a core for itself."""
    idle_s = 60.0 if soak else 5.0
    stack = make_standin("--workers_per_device=2").start().wait_ready(2)
    if soak:
        assert not busy(stack, idle_s)
    stack.set_traps(load_s=300.0)  # its successor sleeps for the rest of the test
    kill(stack.workers("ready")[0]["pid"])
    wait_until(lambda: stack.workers("loading"), 30, "its successor to load")
    assert not busy(stack, idle_s)


def busy(stack: StandInStack, seconds: float) -> list[str]:
    """Processes that took more than their idle share of a core while nothing was asked for."""
    processes = stack.processes()
    assert len(processes) >= 5
    before = {process: cpu_s(process) for process in processes}
    psutil.wait_procs(processes, timeout=seconds)  # none ends: this is the idle time
    shares = {process: (cpu_s(process) - taken) / seconds for process, taken in before.items()}
    return [f"{share:.3f} of a core: {process.cmdline()}" for process, share in shares.items() if share >= IDLE_SHARE]


def cpu_s(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)
