"""The fair queue: whose input goes next.

Priority classes come first, lower numbers before higher. So that a busy class cannot starve the ones behind it, a class that
was passed over ``FLOOR_EVERY - 1`` times in a row leads one batch, at most one batch in ``FLOOR_EVERY``.

Inside a class, requests take turns by deficit round robin (Shreedhar and Varghese, 1996) in tokens: a request of 2048 inputs
and a request of one share the workers evenly. The quantum is never below the longest input that waits, which makes every turn
serve at least one input and every step O(1). However short its inputs are, a turn is at most a quarter of a batch.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from dataclasses import dataclass, field

from packhorse_broker.requests import Item, Request, RequestHeap

QUANTUM_TOKENS = 256
TURNS_PER_BATCH = 4
FLOOR_EVERY = 16


@dataclass(frozen=True, slots=True)
class Limits:
    """What fits one batch."""

    inputs: int
    tokens: int


@dataclass(slots=True)
class _PriorityClass:
    """Requests of one priority that have waiting inputs."""

    ring: OrderedDict[Request, None] = field(default_factory=OrderedDict)
    """Whose turn it is stands first."""
    inputs: int = 0
    tokens: int = 0
    longest: int = QUANTUM_TOKENS
    passed_over: int = 0


@dataclass(slots=True)
class _Draft:
    """A batch while it is packed."""

    limits: Limits
    items: list[Item] = field(default_factory=list)
    tokens: int = 0
    full: bool = False


def _has_queued(request: Request) -> bool:
    return request.queued > 0


class FairQueue:
    """Waiting inputs, suspects excepted. Every method is O(1) or O(log n) in the number of requests."""

    def __init__(self) -> None:
        self.inputs = 0
        self.tokens = 0
        self.requests = 0
        self.returned = 0
        """Waiting inputs that were handed back: they have waited long enough."""
        self._classes: dict[int, _PriorityClass] = {}
        self._by_arrival = RequestHeap(_has_queued)
        self._since_floor = FLOOR_EVERY

    def add(self, request: Request) -> None:
        """Queue a new request with all its inputs."""
        self._enter(request, request.queued, request.queued_tokens, max(request.lengths), at_front=False)

    def put_back(self, request: Request, indexes: list[int]) -> None:
        """Take back inputs that were handed out, to go before all others of their request, which goes next in its class."""
        lengths = [request.lengths[index] for index in indexes]
        request.returned.extendleft(reversed(indexes))
        request.queued += len(indexes)
        request.queued_tokens += sum(lengths)
        self.returned += len(indexes)
        self._enter(request, len(indexes), sum(lengths), max(lengths), at_front=True)

    def remove(self, request: Request) -> None:
        """Drop the waiting inputs of a request."""
        if not request.queued:
            return
        self.returned -= len(request.returned)
        self._count(request, -request.queued, -request.queued_tokens)
        request.queued = request.queued_tokens = 0
        request.returned.clear()
        self._leave(request)

    def draw(self, limits: Limits) -> tuple[list[Item], int]:
        """Pack the next batch: its inputs and its tokens.

        Inputs longer than ``limits.tokens`` are left for a worker that takes more; only then is a batch ever empty while
        inputs wait.
        """
        draft = _Draft(limits)
        priorities = sorted(self._classes)
        floor = self._floor(priorities)
        if floor is not None:
            priorities.remove(floor)
            priorities.insert(0, floor)
        served = set()
        for priority in priorities:
            before = len(draft.items)
            self._draw_from(self._classes[priority], draft)
            if len(draft.items) > before:
                served.add(priority)
            if draft.full:
                break
        if draft.items:
            self._since_floor = 1 if floor is not None else self._since_floor + 1
            for priority in priorities:
                if (waiting := self._classes.get(priority)) is not None:
                    waiting.passed_over = 0 if priority in served else waiting.passed_over + 1
        return draft.items, draft.tokens

    def oldest_arrival(self) -> float | None:
        """When the oldest waiting input was queued."""
        first = self._by_arrival.first()
        return None if first is None else first[0]

    def ahead_of(self, priority: int) -> tuple[int, int]:
        """Inputs and tokens that go before a new request: all of better priorities, and of its own one turn of each request."""
        inputs = tokens = 0.0
        for each, waiting in self._classes.items():
            if each > priority or not waiting.tokens:
                continue
            share = min(1.0, len(waiting.ring) * waiting.longest / waiting.tokens) if each == priority else 1.0
            inputs += share * waiting.inputs
            tokens += share * waiting.tokens
        return math.ceil(inputs), math.ceil(tokens)

    def waiting_requests(self) -> list[Request]:
        """Every request with waiting inputs, in order of service within each class. O(n): for status and tests."""
        return [request for priority in sorted(self._classes) for request in self._classes[priority].ring]

    def _enter(self, request: Request, inputs: int, tokens: int, longest: int, *, at_front: bool) -> None:
        waiting = self._classes.setdefault(request.priority, _PriorityClass())
        if request not in waiting.ring:
            waiting.ring[request] = None
            self.requests += 1
            self._by_arrival.push(request.arrived, request, self.requests)
        if at_front:
            waiting.ring.move_to_end(request, last=False)
        waiting.longest = max(waiting.longest, longest)
        self._count(request, inputs, tokens)

    def _leave(self, request: Request) -> None:
        waiting = self._classes[request.priority]
        del waiting.ring[request]
        self.requests -= 1
        request.deficit = 0
        request.has_turn = False
        if not waiting.ring:
            del self._classes[request.priority]

    def _count(self, request: Request, inputs: int, tokens: int) -> None:
        self.inputs += inputs
        self.tokens += tokens
        waiting = self._classes[request.priority]
        waiting.inputs += inputs
        waiting.tokens += tokens

    def _floor(self, priorities: list[int]) -> int | None:
        """The class that leads this batch although better ones wait."""
        if len(priorities) < 2 or self._since_floor < FLOOR_EVERY:
            return None
        longest_passed = max(priorities[1:], key=lambda priority: self._classes[priority].passed_over)
        return longest_passed if self._classes[longest_passed].passed_over >= FLOOR_EVERY - 1 else None

    def _draw_from(self, waiting: _PriorityClass, draft: _Draft) -> None:
        skipped = 0
        while waiting.ring and skipped < len(waiting.ring) and not draft.full:
            request = next(iter(waiting.ring))
            if request.head_tokens() > draft.limits.tokens:
                skipped += 1
                self._end_turn(waiting, request)
                continue
            skipped = 0
            if not request.has_turn:
                request.has_turn, request.turn_inputs = True, 0
                request.deficit += waiting.longest
            self._take_turn(waiting, request, draft)

    def _take_turn(self, waiting: _PriorityClass, request: Request, draft: _Draft) -> None:
        """Move inputs of one request to the draft until its turn ends or the batch is full."""
        items, limits, lengths, returned = draft.items, draft.limits, request.lengths, request.returned
        inputs = tokens = 0
        most_inputs = max(1, limits.inputs // TURNS_PER_BATCH) - request.turn_inputs
        while request.queued > inputs:
            if inputs >= most_inputs:
                request.deficit = 0  # what short inputs leave of it would add up
                break
            index = returned[0] if returned else request.next_index
            length = lengths[index]
            if length > request.deficit or length > limits.tokens:
                break
            if draft.tokens + length > limits.tokens or len(items) >= limits.inputs:
                draft.full = True
                break
            if returned:
                returned.popleft()
                self.returned -= 1
            else:
                request.next_index += 1
            items.append((request, index))
            draft.tokens += length
            request.deficit -= length
            inputs += 1
            tokens += length
        draft.full = draft.full or len(items) >= limits.inputs
        request.queued -= inputs
        request.turn_inputs += inputs
        request.queued_tokens -= tokens
        self._count(request, -inputs, -tokens)
        if not request.queued:
            self._leave(request)
        elif not draft.full:
            self._end_turn(waiting, request)

    @staticmethod
    def _end_turn(waiting: _PriorityClass, request: Request) -> None:
        request.has_turn = False
        waiting.ring.move_to_end(request)
