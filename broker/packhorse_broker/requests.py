"""Requests that were accepted and are not answered yet.

An input of a request is always in exactly one place: waiting in its request (never handed out, or handed back), among the
suspects, in a batch on a worker, or answered.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import accumulate

from packhorse_shared.codec import Buffer
from packhorse_shared.messages import BYTES_PER_TOKEN, EncodeOptions, SubmittedRequest


@dataclass(slots=True, eq=False)
class Request:
    """One HTTP request. ``closed`` once it is answered, failed or forgotten: nothing is ever sent for it again."""

    frontend: bytes
    rid: int
    lengths: list[int]
    """Tokens of each input."""
    starts: list[int]
    """Where each input's ids start in ``payload``, in tokens; one more entry for the end."""
    payload: memoryview
    options: EncodeOptions
    priority: int
    arrived: float
    deadline: float
    unanswered: int
    queued: int
    """Inputs that wait in the fair queue."""
    queued_tokens: int
    next_index: int = 0
    """Inputs from here on were never handed out."""
    returned: deque[int] = field(default_factory=deque)
    """Inputs that were handed back; they go first."""
    deficit: int = 0
    """Tokens that it may still take in its present turn."""
    has_turn: bool = False
    turn_inputs: int = 0
    """Inputs that it has already taken in its present turn."""
    attempts: dict[int, int] = field(default_factory=dict)
    """Input index to attempts charged, for those that have any."""
    silences: set[int] = field(default_factory=set)
    """Inputs that a silent worker held once: forgiven, the next silence is charged."""
    suspect_inputs: int = 0
    """Inputs that wait among the suspects."""
    suspect_tokens: int = 0
    closed: bool = False

    def head_tokens(self) -> int:
        """Length of the input that goes next. Only while ``queued``."""
        return self.lengths[self.returned[0] if self.returned else self.next_index]

    def slice_of(self, first: int, last: int) -> Buffer:
        """The ids of inputs ``first`` to ``last``, inclusive."""
        return self.payload[BYTES_PER_TOKEN * self.starts[first] : BYTES_PER_TOKEN * self.starts[last + 1]]

    @property
    def held_bytes(self) -> int:
        """Size of its ids."""
        return BYTES_PER_TOKEN * self.starts[-1]


Item = tuple[Request, int]
"""One input: its request and its index there."""


def accept(frontend: bytes, submitted: SubmittedRequest, payload: memoryview, now: float) -> Request:
    """A request as it enters the broker; ``payload`` holds its own ids and no others."""
    starts = list(accumulate(submitted.lengths, initial=0))
    return Request(
        frontend=frontend,
        rid=submitted.rid,
        lengths=submitted.lengths,
        starts=starts,
        payload=payload,
        options=submitted.options,
        priority=submitted.priority,
        arrived=now,
        deadline=now + submitted.ttl_ms / 1000,
        unanswered=len(submitted.lengths),
        queued=len(submitted.lengths),
        queued_tokens=starts[-1],
    )


class RequestHeap:
    """Requests by a time, earliest first. Removal is lazy: entries that no longer count are dropped when they surface, and
    all at once when they are the majority, so that memory follows the live requests and every step is O(log n) amortized."""

    _SLACK = 64

    def __init__(self, counts: Callable[[Request], bool]) -> None:
        self._counts = counts
        self._heap: list[tuple[float, int, Request]] = []
        self._serial = 0

    def push(self, when: float, request: Request, live: int) -> None:
        """Add a request; ``live`` is about how many entries count now."""
        self._serial += 1
        heapq.heappush(self._heap, (when, self._serial, request))
        if len(self._heap) > 2 * live + self._SLACK:
            self._heap = [entry for entry in self._heap if self._counts(entry[2])]
            heapq.heapify(self._heap)

    def first(self) -> tuple[float, Request] | None:
        """The earliest entry that counts."""
        heap = self._heap
        while heap:
            when, _, request = heap[0]
            if self._counts(request):
                return when, request
            heapq.heappop(heap)
        return None
