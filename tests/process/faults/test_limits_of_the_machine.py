"""Too few file descriptors, and a disk that is full: it serves on, or says in one clear line why not."""

from __future__ import annotations

import contextlib
import resource
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from footprint import Settled
from harm import kill, logged
from load import Load
from questions import random_questions
from raw_http import connect
from standin_stack import StandInFactory, StandInStack
from waiting import wait_until

pytestmark = pytest.mark.process

SEED = 101
FLOOD = 200
MOST_CPU_SHARE = 0.3
"""Of a core, for a frontend that has no descriptor left; an accept that spins takes all of one."""


# ---- file descriptors ----


def limit_children(stack: StandInStack, descriptors: int) -> StandInStack:
    """Every process that supervisord starts may open so few files, as ``ulimit -n`` says it."""
    script = Path(stack.command[0])
    line = f'[ "$1" = embeddings ] || ulimit -n {descriptors}\nexec '
    script.write_text(script.read_text(encoding="utf-8").replace("exec ", line), encoding="utf-8")
    return stack


@contextlib.contextmanager
def flood(port: int) -> Iterator[list[socket.socket]]:
    """Connections that stay open and say nothing."""
    with contextlib.ExitStack() as opened:
        yield [opened.enter_context(connect(port)) for _ in range(FLOOD)]


def ask_health(connection: socket.socket) -> int | None:
    """What a request on this connection is answered; None where it was closed without a word."""
    try:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        answer = b""
        while not answer.endswith(b"}") and (received := connection.recv(4096)):
            answer += received
    except OSError:
        return None
    return int(answer.split()[1]) if answer else None


def cpu_share(process: psutil.Process, for_s: float = 1.0) -> float:
    """What a process takes of a core, measured now."""
    before, began = process.cpu_times(), time.monotonic()
    time.sleep(for_s)  # a span of time is what is measured
    after = process.cpu_times()
    return (after.user + after.system - before.user - before.system) / (time.monotonic() - began)


def assert_serves(stack: StandInStack) -> None:
    with Load(stack.port, random_questions(SEED), clients=2, at_most=50, seed=SEED) as load:
        report = load.wait_done()
    report.assert_invariant()
    assert set(report.counts) == {200}, report


@pytest.mark.parametrize("descriptors", [64, 128])
def test_few_descriptors_from_the_start(make_standin: StandInFactory, settled: Settled, descriptors: int) -> None:
    """As many connections are served as there is room for, a few more are told so, the rest closed. Room for what the process
    needs itself is kept: it finds a new broker, and who was connected before is served on."""
    stack = limit_children(make_standin("--receive_timeout=30"), descriptors).start().wait_ready()
    frontend = stack.processes("frontend")[0]
    assert frontend.rlimit(psutil.RLIMIT_NOFILE) == (descriptors, descriptors)
    with settled(stack):
        with connect(stack.port) as customer, flood(stack.port) as connections:
            assert ask_health(customer) == 200
            statuses = [ask_health(connection) for connection in connections]
            assert cpu_share(frontend) < MOST_CPU_SHARE
            assert frontend.num_fds() < descriptors
            kill(stack.processes("broker")[0].pid)
            wait_until(lambda: len(logged(stack, "frontend joined")) == 2, 15, "the next broker to be found")
            wait_until(lambda: ask_health(customer) == 200, 15, "it to serve")
        print(f"of {FLOOD}: {statuses.count(200)} served, {statuses.count(503)} refused, {statuses.count(None)} closed")
        assert descriptors - 64 <= statuses.count(200) < descriptors
        assert set(statuses) <= {200, 503, 408, None}
        assert {200, None} < set(statuses)
        assert_serves(stack)
    assert stack.processes("frontend") == [frontend]
    assert stack.text().count("fewer connections than max_connections") == 1


def test_descriptors_that_run_out_later(make_standin: StandInFactory, settled: Settled) -> None:
    """Connections that cannot be taken in are closed, without a spinning loop; with the first free descriptor all is well."""
    stack = make_standin().start().wait_ready()
    frontend = stack.processes("frontend")[0]
    with settled(stack), connect(stack.port) as customer:
        assert ask_health(customer) == 200
        limits = frontend.rlimit(psutil.RLIMIT_NOFILE)
        frontend.rlimit(psutil.RLIMIT_NOFILE, (frontend.num_fds() + 3, limits[1]))
        with flood(stack.port) as connections:
            assert cpu_share(frontend) < MOST_CPU_SHARE
            assert ask_health(customer) == 200
            assert sum(ask_health(connection) == 200 for connection in connections) <= 3
        assert_serves(stack)
        frontend.rlimit(psutil.RLIMIT_NOFILE, limits)
        assert ask_health(customer) == 200
    assert stack.processes("frontend") == [frontend]


def test_far_too_few_descriptors_is_one_clear_line(make_standin: StandInFactory) -> None:
    stack = limit_children(make_standin(), 32).start()
    assert stack.process is not None
    assert stack.process.wait(30) == 1
    last = stack.text().splitlines()[-1]
    assert "frontend-0 cannot start: open files: the limit is 32 (ulimit -n), a frontend needs at least 56" in last


# ---- the disk ----


def limit_file_sizes(stack: StandInStack, limit: int) -> None:
    """No file may grow beyond so many bytes, for no process of the server nor those that they start: with 0 it is as if every
    disk were full. (The kernel says EFBIG then instead of ENOSPC, which nobody here tells apart.)"""
    assert stack.process is not None
    for process in [psutil.Process(stack.process.pid), *stack.processes()]:
        process.rlimit(psutil.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))


def replace_part(stack: StandInStack, role: str) -> None:
    """Kill a process, and wait for its successor."""
    victim = stack.processes(role)[0]
    kill(victim.pid)
    wait_until(lambda: [each.pid for each in stack.processes(role) if each.pid != victim.pid], 15, f"the next {role}")


def test_full_disks(make_standin: StandInFactory, settled: Settled) -> None:
    """Logs, run directory and /tmp take nothing more: it serves on, and every part that dies is restarted. When there is room
    again, logs are written again."""
    stack = make_standin("--workers_per_device=2").start().wait_ready(2)
    with settled(stack):
        limit_file_sizes(stack, 0)
        with Load(stack.port, random_questions(SEED), clients=2, seed=SEED) as load:
            load.wait_for(20)
            for role in ("worker", "broker", "worker"):
                replace_part(stack, role)
                wait_until(lambda: is_ready(stack), 30, "two ready workers")
                load.wait_for(20)
        report = load.report()
        print(f"seed {SEED}: {report}")
        report.assert_invariant()
        assert set(report.counts) <= {200, 503}
        replace_part(stack, "frontend")
        wait_until(lambda: is_ready(stack), 30, "the next frontend to serve")
        assert_serves(stack)
        before = log_size(stack)
        limit_file_sizes(stack, resource.RLIM_INFINITY)
        replace_part(stack, "worker")
        wait_until(lambda: is_ready(stack), 30, "two ready workers")
    assert log_size(stack) > before
    assert "worker lost" in (stack.run_dir / "broker.log").read_text(encoding="utf-8")
    assert stack.stop() == 0


def is_ready(stack: StandInStack) -> bool:
    try:
        return len(stack.workers("ready", "busy")) == 2
    except (httpx.TransportError, AssertionError):
        return False


def log_size(stack: StandInStack) -> int:
    return sum((stack.run_dir / name).stat().st_size for name in ("supervisord.log", "broker.log"))
