"""Whether processes grow: their resident memory once a second, and the slope of a line through it."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import psutil

from stack import Stack

EVERY_S = 1.0
LONG_ENOUGH_S = 600.0
"""A slope over less says nothing about hours."""
MOST_BYTES_PER_HOUR = 1 << 20


@dataclass
class Memory:
    """One process's samples after its warm-up."""

    name: str
    pid: int
    times: list[float] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.times[-1] - self.times[0] if self.times else 0.0

    def slope_per_hour(self) -> tuple[float, float]:
        """Bytes an hour by least squares, and the standard error of that."""
        return _slope(self.times, self.resident_bytes)

    @property
    def grows(self) -> bool:
        """Whether it certainly gains more than the limit in every third of a time that is long enough.

        An allocator keeps what the worst moment so far took, so that memory rises in steps which become ever rarer. A leak goes
        on and on.
        """
        if self.seconds < LONG_ENOUGH_S:
            return False
        cuts = [len(self.times) * third // 3 for third in range(4)]
        thirds = [_slope(self.times[start:end], self.resident_bytes[start:end]) for start, end in pairwise(cuts)]
        return all(slope - 3 * error > MOST_BYTES_PER_HOUR for slope, error in thirds)


def _slope(times_s: Sequence[float], values: Sequence[float]) -> tuple[float, float]:
    """Change an hour of a line through the values, and its standard error."""
    if len(times_s) < 10:
        return 0.0, math.inf
    times = (np.array(times_s) - times_s[0]) / 3600
    held = np.array(values, dtype=np.float64)
    centred = times - times.mean()
    slope = float(centred @ held / (centred @ centred))
    rest = held - held.mean() - slope * centred
    return slope, math.sqrt(float(rest @ rest) / (len(times) - 2) / float(centred @ centred))


class MemoryWatch:
    """Samples every process of a server from a thread of its own until ``stop``."""

    def __init__(self, stack: Stack, warm_up_s: float) -> None:
        self._stack = stack
        self._warm_up_s = warm_up_s
        self._memories: dict[int, Memory] = {}
        self._first_seen: dict[int, float] = {}
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="memory", daemon=True)
        self._thread.start()

    def stop(self) -> list[Memory]:
        """What was seen of each process, those that lived longest first."""
        self._stopping.set()
        self._thread.join(10)
        return sorted(self._memories.values(), key=lambda each: -each.seconds)

    def _watch(self) -> None:
        while not self._stopping.wait(EVERY_S):
            for process in self._stack.processes():
                self._sample(process)

    def _sample(self, process: psutil.Process) -> None:
        now = time.monotonic()
        if now - self._first_seen.setdefault(process.pid, now) < self._warm_up_s:
            return
        try:
            resident_bytes = process.memory_info().rss
            if process.pid not in self._memories:
                self._memories[process.pid] = Memory(_name_of(process.cmdline()), process.pid)
        except psutil.Error:
            return
        memory = self._memories[process.pid]
        memory.times.append(now)
        memory.resident_bytes.append(resident_bytes)


def _name_of(words: list[str]) -> str:
    """``worker 0`` of a command line."""
    for role in ("broker", "worker", "frontend"):
        if role in words:
            return " ".join([role, *words[words.index(role) + 2 :][:1]])
    return "supervisord"
