"""What is kept of the requests of one slice: 28 bytes for each that was answered, a count for each kind of failure."""

from __future__ import annotations

import time
from array import array
from dataclasses import dataclass, field

SERVER_TIMES = ("queue", "tokenize", "encode")
"""What the server tells of itself, in the headers ``x-packhorse-<name>-ms``."""


def _floats() -> array[float]:
    return array("f")  # four bytes hold seven digits: microseconds of a latency, tenths of a millisecond of an hour


@dataclass
class Failures:
    """Failures of one kind."""

    is_transport: bool
    """Not an answer of the server that says no, but none, or one that is wrong."""
    example: str
    count: int = 0


@dataclass
class Samples:
    """One slice: the load on one server without a pause. Times are seconds; those of requests count from ``begun_at``."""

    begun_at: float = field(default_factory=time.monotonic)
    stopped_at: float = 0.0
    """When the load ended; requests that were open then ended later."""
    is_interrupted: bool = False
    """Whether it was ended early, by Ctrl-C."""
    cpu_share: float = 0.0
    """What this process took of one core meanwhile: near 1 the client itself is the limit."""

    ended: array[float] = field(default_factory=_floats)
    took: array[float] = field(default_factory=_floats)
    """From sending to the last byte of the answer."""
    late: array[float] = field(default_factory=_floats)
    """From the time when it was due to sending; always 0 in a closed loop."""
    inputs: array[int] = field(default_factory=lambda: array("I"))
    tokens: int = 0
    server_ms: dict[str, array[float]] = field(default_factory=lambda: {name: _floats() for name in SERVER_TIMES})
    """One value for each answer, NaN where the header was missing."""

    begun: int = 0
    """Requests that were sent."""
    refused: int = 0
    """429: the server said that it is full. No failure, and no latency."""
    refusal: str = ""
    """What the first of them said."""
    failures: dict[str, Failures] = field(default_factory=dict)
    abandoned: int = 0
    """Open when the run was interrupted."""
    waited_for_connection: int = 0
    """Requests of an open loop that were due while all connections were in use."""
    never_sent: int = 0
    """Requests of an open loop that were due, and for which no connection came free until its end."""
    loop_lag: array[float] = field(default_factory=_floats)
    """How late the client's event loop was, looked at every 20 ms."""

    @property
    def answered(self) -> int:
        """Requests with a right answer."""
        return len(self.ended)

    @property
    def failed(self) -> int:
        """Requests that failed, without those refused."""
        return sum(each.count for each in self.failures.values())

    @property
    def still_open(self) -> int:
        """Requests that were sent and have not ended."""
        return self.begun - self.answered - self.refused - self.failed - self.abandoned

    def fail(self, kind: str, message: str, *, is_transport: bool) -> None:
        """Count a failure; the first message of a kind is its example."""
        if kind not in self.failures:
            self.failures[kind] = Failures(is_transport, message)
        self.failures[kind].count += 1
