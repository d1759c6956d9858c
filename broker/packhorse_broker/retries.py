"""Inputs whose worker died: who is to blame is found without harming the others.

Each death charges an attempt to every input of the batch that ran, and of the next one too where the worker had begun it
(``WorkerLimits.overlaps``): any of them may be what it died of. The first attempt was a batch of n; the second is made in
groups of about sqrt(n), the third alone. An input that fails the third is the guilty one, after exactly three deaths whatever
the batch size, and its neighbours of the first batch are long served. Groups are never mixed with other inputs and run one at
a time, with nothing else on their worker: so who was charged in bad company passes, and the other workers keep serving. The
last worker that is left is spared while others are on their way back: if a group kills that one too, nobody serves at all.

Only of two workers the second one takes a first retry at once: most deaths are no input's fault, and waiting for a reload would
be the rule there.

An input that hangs takes time instead: ``batch_timeout`` for each attempt, which its neighbours do not have twice. So the
inputs of a batch that ran out of it go alone at once, and a group that runs for longer than ``leases.HELD_UP_S`` no longer
holds up the others: its worker counts as lost for them.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

from packhorse_broker.fairness import Limits
from packhorse_broker.requests import Item, Request

MAX_ATTEMPTS = 3
SPARED_S = 10.0
"""How long the last worker is spared."""
_AT_ONCE = float("-inf")


@dataclass(slots=True)
class _Group:
    """Inputs that are retried together."""

    items: list[Item]
    spares_until: float
    """Until then it does not go to the last live worker."""


class Suspects:
    """Groups of inputs that wait for their second or third attempt, first come, first served."""

    def __init__(self) -> None:
        self.inputs = 0
        self.tokens = 0
        self._groups: deque[_Group] = deque()

    def add(self, items: list[Item], now: float, *, known_workers: int, alone: bool = False) -> None:
        """Queue charged inputs of one batch, in groups by how often they were charged; ``alone``: each by itself.

        ``known_workers``: those there are and those that lately were; 0 where no worker died of it.
        """
        spares_until = now + SPARED_S
        first = [(request, index) for request, index in items if request.attempts[index] == 1]
        later = [(request, index) for request, index in items if request.attempts[index] > 1]
        size = 1 if alone else max(1, math.ceil(math.sqrt(len(first))))
        groups = [(first[start : start + size], known_workers > 2) for start in range(0, len(first), size)]
        groups += [([item], known_workers > 1) for item in later]
        self._groups.extend(_Group(group, spares_until if spares else _AT_ONCE) for group, spares in groups)
        for request, index in items:
            self._count(request, 1, request.lengths[index])

    def put_back(self, items: list[Item]) -> None:
        """Take back a group that was handed out and not begun."""
        for request, index in items:
            self._count(request, 1, request.lengths[index])
        self._groups.appendleft(_Group(items, _AT_ONCE))

    def goes_at(self, free_workers: int) -> float:
        """From when on a group may be handed out, by ``Fleet.free_workers``. Only while some wait."""
        if free_workers > 1:
            return _AT_ONCE
        return min(group.spares_until for group in self._groups if any(not request.closed for request, _ in group.items))

    def draw(self, limits: Limits, free_workers: int, now: float) -> tuple[list[Item], int]:
        """The next group, or as much of it as fits: its inputs and its tokens. Empty when it fits this worker not at all, or
        when all that wait spare the last worker."""
        passed: list[_Group] = []
        drawn: tuple[list[Item], int] = [], 0
        while self._groups:
            group = self._groups.popleft()
            group.items = [(request, index) for request, index in group.items if not request.closed]
            if not group.items:
                continue
            passed.append(group)
            if free_workers > 1 or group.spares_until <= now:
                drawn = self._cut(group, limits)
                break
        self._groups.extendleft(group for group in reversed(passed) if group.items)
        return drawn

    def _cut(self, group: _Group, limits: Limits) -> tuple[list[Item], int]:
        """Take off a group what fits."""
        fitting, tokens = 0, 0
        for request, index in group.items[: limits.inputs]:
            if tokens + request.lengths[index] > limits.tokens:
                break
            fitting, tokens = fitting + 1, tokens + request.lengths[index]
        taken, group.items = group.items[:fitting], group.items[fitting:]
        for request, index in taken:
            self._count(request, -1, -request.lengths[index])
        return taken, tokens

    def remove(self, request: Request) -> None:
        """Drop the inputs of a request that is closed; its entries fall out when they are drawn."""
        self._count(request, -request.suspect_inputs, -request.suspect_tokens)

    def waiting(self) -> list[Item]:
        """Every input that waits here. O(n): for status and tests."""
        return [item for group in self._groups for item in group.items if not item[0].closed]

    def _count(self, request: Request, inputs: int, tokens: int) -> None:
        self.inputs += inputs
        self.tokens += tokens
        request.suspect_inputs += inputs
        request.suspect_tokens += tokens
