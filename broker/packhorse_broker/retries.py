"""Inputs whose worker died: who is to blame is found without harming the others.

Each death charges an attempt to every input of the batch that ran. The first attempt was a batch of n; the second is made in
groups of about sqrt(n), the third alone. An input that fails the third is the guilty one, after exactly three deaths whatever
the batch size, and its neighbours of the first batch are long served. Groups are never mixed with other inputs and run one at
a time, so that the other workers keep serving.
"""

from __future__ import annotations

import math
from collections import deque

from packhorse_broker.fairness import Limits
from packhorse_broker.requests import Item, Request

MAX_ATTEMPTS = 3


class Suspects:
    """Groups of inputs that wait for their second or third attempt, first come, first served."""

    def __init__(self) -> None:
        self.inputs = 0
        self.tokens = 0
        self._groups: deque[list[Item]] = deque()

    def add(self, items: list[Item]) -> None:
        """Queue charged inputs of one batch, in groups by how often they were charged."""
        first = [(request, index) for request, index in items if request.attempts[index] == 1]
        later = [(request, index) for request, index in items if request.attempts[index] > 1]
        size = max(1, math.ceil(math.sqrt(len(first))))
        groups = [first[start : start + size] for start in range(0, len(first), size)] + [[item] for item in later]
        for request, index in items:
            self._count(request, 1, request.lengths[index])
        self._groups.extend(groups)

    def put_back(self, items: list[Item]) -> None:
        """Take back a group that was handed out and not begun."""
        for request, index in items:
            self._count(request, 1, request.lengths[index])
        self._groups.appendleft(items)

    def draw(self, limits: Limits) -> tuple[list[Item], int]:
        """The next group, or as much of it as fits: its inputs and its tokens. Empty when it fits this worker not at all."""
        while self._groups:
            group = [(request, index) for request, index in self._groups.popleft() if not request.closed]
            if not group:
                continue
            fitting, tokens = 0, 0
            for request, index in group[: limits.inputs]:
                if tokens + request.lengths[index] > limits.tokens:
                    break
                fitting, tokens = fitting + 1, tokens + request.lengths[index]
            if group[fitting:]:
                self._groups.appendleft(group[fitting:])
            for request, index in group[:fitting]:
                self._count(request, -1, -request.lengths[index])
            return group[:fitting], tokens
        return [], 0

    def remove(self, request: Request) -> None:
        """Drop the inputs of a request that is closed; its entries fall out when they are drawn."""
        self._count(request, -request.suspect_inputs, -request.suspect_tokens)

    def waiting(self) -> list[Item]:
        """Every input that waits here. O(n): for status and tests."""
        return [item for group in self._groups for item in group if not item[0].closed]

    def _count(self, request: Request, inputs: int, tokens: int) -> None:
        self.inputs += inputs
        self.tokens += tokens
        request.suspect_inputs += inputs
        request.suspect_tokens += tokens
