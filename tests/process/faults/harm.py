"""What tests do to the processes of a server, and what they look up to do it at the right moment."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

import httpx

from stack import Stack
from waiting import wait_until


def kill(pid: int) -> None:
    """End a process as the kernel does when memory is short."""
    os.kill(pid, signal.SIGKILL)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    """A process that does not run for the time of the block; it may have been killed meanwhile."""
    os.kill(pid, signal.SIGSTOP)
    try:
        yield
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)


def ready_workers(stack: Stack) -> list[dict[str, Any]]:
    """Workers that take batches, by slot; none while the server does not answer."""
    try:
        return sorted(stack.workers("ready", "busy"), key=lambda worker: str(worker["id"]))
    except (httpx.TransportError, AssertionError):
        return []


def queued_inputs(stack: Stack) -> int | None:
    """None while the server does not answer."""
    try:
        return int(stack.status()["queue"]["inputs"])
    except (httpx.TransportError, AssertionError):
        return None


def wait_ready_workers(stack: Stack, count: int, within_s: float = 30.0) -> list[dict[str, Any]]:
    wait_until(lambda: len(ready_workers(stack)) == count, within_s, f"{count} ready workers")
    return ready_workers(stack)


def busy_worker(stack: Stack, slot: int) -> int:
    """The pid of a slot's worker at a moment at which it has a batch."""

    def look() -> int | None:
        for worker in ready_workers(stack):
            if worker["id"] == f"worker-{slot}" and worker["in_flight"]:
                return int(worker["pid"])
        return None

    return int(wait_until(look, 30, f"worker-{slot} to be busy"))


def kill_and_replace(stack: Stack, pid: int, count: int, within_s: float = 30.0) -> None:
    """Kill a worker and wait until its successor is ready, so that there are ``count`` again. The broker may notice the death a
    moment later: until then the dead one counts, too."""
    kill(pid)

    def is_replaced() -> bool:
        pids = [worker["pid"] for worker in ready_workers(stack)]
        return pid not in pids and len(pids) == count

    wait_until(is_replaced, within_s, f"the successor of worker {pid}")


def log_of(stack: Stack, part: str = "broker") -> str:
    """All that a part of the server has logged, the rotated files included."""
    paths = sorted(stack.run_dir.glob(f"{part}.log*"), reverse=True)
    return "".join(path.read_text(errors="replace") for path in paths)


def logged(stack: Stack, pattern: str, part: str = "broker") -> list[str]:
    """What the first group of a pattern, or all of it, matched in a log, match by match."""
    return re.findall(pattern, log_of(stack, part))
