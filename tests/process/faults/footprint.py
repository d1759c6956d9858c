"""Whether a server is back where it was: nothing queued, nothing in flight, no descriptor and no memory kept."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass

import httpx
import psutil

from stack import Stack
from waiting import wait_until

_SPARE_DESCRIPTORS = 8
"""Of a process that goes on: a kept connection or two, a log file that rotates, a peer that reconnected."""
_SPARE_BYTES = 64 << 20
"""Memory that a process may have gained: what an allocator keeps of the worst moment. Slopes are watched by the storm."""


@dataclass(frozen=True)
class _Held:
    descriptors: int
    resident_bytes: int


class Footprint:
    """What the processes of a server hold now, to be compared with later."""

    def __init__(self, stack: Stack) -> None:
        self._stack = stack
        self._before = {process: held for process in stack.processes() if (held := _held(process)) is not None}

    def assert_back(self, within_s: float = 15.0) -> None:
        """Wait until the server is idle and every process that still lives holds what it held. Loads must have ended."""
        wait_until(lambda: not self._busy(), within_s, f"an idle server: {self._busy()}")
        wait_until(lambda: not self._grown(), within_s, f"processes back to what they held: {self._grown()}")

    def _busy(self) -> list[str]:
        """What the server still has to do."""
        try:
            status = self._stack.status()
        except (httpx.TransportError, AssertionError) as problem:
            return [f"no answer: {problem}"]
        queue = status["queue"]
        found = [f"queue: {queue}"] if queue["inputs"] or queue["requests"] else []
        return found + [f"in flight: {worker}" for worker in status["workers"] if worker["in_flight"]]

    def _grown(self) -> list[str]:
        """Which processes hold more than they did."""
        found = []
        for process, before in self._before.items():
            if (now := _held(process)) is None:
                continue
            if now.descriptors > before.descriptors + _SPARE_DESCRIPTORS:
                found.append(f"{process.pid}: {before.descriptors} descriptors, now {now.descriptors}")
            if now.resident_bytes > before.resident_bytes + _SPARE_BYTES:
                found.append(f"{process.pid}: {before.resident_bytes >> 20} MiB, now {now.resident_bytes >> 20} MiB")
        return found


Settled = Callable[[Stack], AbstractContextManager[Footprint]]
"""The fixture ``settled``."""


def _held(process: psutil.Process) -> _Held | None:
    """None when it has ended."""
    try:
        return _Held(process.num_fds(), process.memory_info().rss)
    except (psutil.NoSuchProcess, psutil.ZombieProcess, psutil.AccessDenied):
        return None
