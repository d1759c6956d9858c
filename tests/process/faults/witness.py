"""What others notice while somebody attacks a server: real traffic, /health, and the memory of the frontend."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import psutil

from aims import Aims
from load import Load
from questions import Question
from raw_http import connect
from standin_stack import StandInStack
from waiting import wait_until

_LOOK_EVERY_S = 0.02
_HEALTH = b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n"
_HEALTH_WITHIN_S = 3.0
"""However busy the machine is: probes of other systems give up about then."""
_HEALTH_AIM_S = 0.5
_PEAK_MIB = 64
_KEPT_MIB = 32
"""What an allocator may keep of the worst moment."""
_MIB = 1 << 20


@dataclass
class Witnessed:
    """What was seen so far."""

    health_s: list[float] = field(default_factory=list)
    faults: list[str] = field(default_factory=list)
    most_bytes: int = 0
    """Most resident memory that the frontend had."""

    def wait_for_look(self, within_s: float = 30.0) -> None:
        """Wait until /health was answered once more, or failed: however short an attack, it is seen before and after."""
        looks = len(self.health_s)
        wait_until(lambda: len(self.health_s) > looks or self.faults, within_s, "an answer of /health")


@contextmanager
def bystanders(
    stack: StandInStack, questions: list[Question], aims: Aims, *, attacked: psutil.Process | None = None
) -> Iterator[Witnessed]:
    """Real traffic and a health check on connections of their own, for the time of the block. At its end: all answers were
    200, with their own vectors; /health was quick; and the attacked frontend has no more memory than before, give or take."""
    frontend = attacked or stack.processes("frontend")[0]
    before = frontend.memory_info().rss
    witnessed, over = Witnessed(most_bytes=before), threading.Event()
    with Load(stack.port, questions, clients=2) as load, connect(stack.port) as connection:
        load.wait_for(20)
        watcher = threading.Thread(target=_watch, args=(connection, frontend, witnessed, over), name="witness")
        watcher.start()
        try:
            witnessed.wait_for_look()
            yield witnessed
            load.wait_for(20)
            witnessed.wait_for_look()
        finally:
            over.set()
            watcher.join()
    report = load.report()
    report.assert_invariant()
    assert set(report.counts) == {200}, report.counts
    assert not witnessed.faults, witnessed.faults
    assert max(witnessed.health_s) < _HEALTH_WITHIN_S
    peak, kept = (witnessed.most_bytes - before) / _MIB, (frontend.memory_info().rss - before) / _MIB
    print(f"frontend {before / _MIB:.0f} MiB, peak +{peak:.0f}, kept +{kept:.0f}; health {max(witnessed.health_s):.3f} s")
    assert peak <= _PEAK_MIB
    assert kept <= _KEPT_MIB
    aims.note("slowest /health beside an attack", max(witnessed.health_s), "s", at_most=_HEALTH_AIM_S)


def _watch(connection: socket.socket, frontend: psutil.Process, witnessed: Witnessed, over: threading.Event) -> None:
    """Ask for /health on one kept connection, made before there was harm, and look at the memory."""
    with connection:
        while not over.wait(_LOOK_EVERY_S):
            witnessed.most_bytes = max(witnessed.most_bytes, frontend.memory_info().rss)
            began = time.monotonic()
            try:
                connection.sendall(_HEALTH)
                answer = b""
                while not answer.endswith(b"}"):
                    received = connection.recv(4096)
                    assert received, "the connection for /health was closed"
                    answer += received
            except (OSError, AssertionError) as problem:
                witnessed.faults.append(repr(problem))
                return
            witnessed.health_s.append(time.monotonic() - began)
            if not answer.startswith(b"HTTP/1.1 200"):
                witnessed.faults.append(repr(answer))
