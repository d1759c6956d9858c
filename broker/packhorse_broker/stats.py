"""Rates over the last seconds, and each worker's busy share."""

from __future__ import annotations

from collections import deque

WINDOW_S = 5


class Rates:
    """Sums over the last ``WINDOW_S`` seconds, in buckets of one second. ``add`` is O(1)."""

    def __init__(self, started_at: float, size: int) -> None:
        self._started_at = started_at
        self._size = size
        self._buckets: deque[tuple[int, list[float]]] = deque()

    def add(self, now: float, *amounts: float) -> None:
        """Count ``amounts``, one per quantity, as happening now."""
        second = int(now)
        if not self._buckets or self._buckets[-1][0] != second:
            self._buckets.append((second, [0.0] * self._size))
            self._drop_old(now)
        sums = self._buckets[-1][1]
        for position, amount in enumerate(amounts):
            sums[position] += amount

    def per_second(self, now: float) -> list[float]:
        """Each quantity's mean rate since the start or over the window, whichever is shorter."""
        self._drop_old(now)
        oldest = max(self._started_at, int(now) - WINDOW_S + 1.0)
        elapsed_s = max(now - oldest, 1.0)
        return [sum(sums[position] for _, sums in self._buckets) / elapsed_s for position in range(self._size)]

    def _drop_old(self, now: float) -> None:
        while self._buckets and self._buckets[0][0] <= int(now) - WINDOW_S:
            self._buckets.popleft()


class BusyShare:
    """How much of the last seconds a worker had a batch to run."""

    def __init__(self, started_at: float) -> None:
        self._rates = Rates(started_at, 1)

    def ran(self, began: float, ended: float) -> None:
        """A batch ran from ``began`` to ``ended``; each second gets its own part."""
        began = max(began, ended - WINDOW_S)
        while began < ended:
            until = min(ended, int(began) + 1.0)
            self._rates.add(began, until - began)
            began = until

    def share(self, now: float, running_since: float | None) -> float:
        """From 0 to 1, the batch that runs included."""
        busy = self._rates.per_second(now)[0]
        if running_since is not None:
            busy += min(now - running_since, WINDOW_S) / WINDOW_S
        return round(min(busy, 1.0), 4)


class MovingAverage:
    """An exponentially weighted mean that starts at its first value."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self.value: float | None = None

    def add(self, value: float) -> None:
        """One more observation."""
        self.value = value if self.value is None else self.value + self._weight * (value - self.value)
