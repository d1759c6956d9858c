"""When a batch leaves.

A batch leaves as soon as a worker can take it and any of these holds:

1. it has ``max_batch_size`` inputs;
2. the next input would take it over ``max_num_tokens``;
3. its oldest input has waited ``max_queue_delay``, counted from the moment it was queued.

``auto`` delay: hold at most ``AUTO_HOLD_S``, and only while recent arrivals make company likely.
"""

from __future__ import annotations

from packhorse_broker.fairness import FairQueue, Limits
from packhorse_shared.messages import WorkerLimits
from packhorse_shared.settings import BatchingSettings

AUTO_HOLD_S = 0.005
_AUTO_WEIGHT = 0.2
_AUTO_LONGEST_GAP_S = 0.05
"""A longer pause between arrivals counts as this long, so that a burst after a quiet hour is recognized within itself."""
_AUTO_LIKELY_GAP_S = AUTO_HOLD_S / 2
"""Company is likely while at least two more arrivals are expected within the hold."""
_AUTO_PATIENCE_GAPS = 3
_AUTO_LEAST_PATIENCE_S = 0.001
"""When nothing came for this many usual gaps, and for this long, the burst is over."""


class ArrivalRate:
    """A moving average of the time between requests."""

    def __init__(self) -> None:
        self._last_arrival = float("-inf")
        self._gap_s = _AUTO_LONGEST_GAP_S

    def arrived(self, now: float) -> None:
        """A request was queued."""
        gap_s = min(now - self._last_arrival, _AUTO_LONGEST_GAP_S)
        self._gap_s += _AUTO_WEIGHT * (gap_s - self._gap_s)
        self._last_arrival = now

    def hold_until(self, oldest_arrival: float) -> float:
        """How long it is worth holding an input that was queued at ``oldest_arrival``."""
        if self._gap_s > _AUTO_LIKELY_GAP_S:
            return oldest_arrival
        burst_over = self._last_arrival + max(_AUTO_PATIENCE_GAPS * self._gap_s, _AUTO_LEAST_PATIENCE_S)
        return min(oldest_arrival + AUTO_HOLD_S, max(oldest_arrival, burst_over))


class DispatchRules:
    """The three rules, for one server's settings."""

    def __init__(self, settings: BatchingSettings) -> None:
        self._settings = settings
        self.arrivals = ArrivalRate()

    def limits_of(self, worker: WorkerLimits) -> Limits:
        """What one worker is sent in one batch: the smaller of its own limits and the settings."""
        max_num_tokens = self._settings.max_num_tokens
        return Limits(
            inputs=min(self._settings.max_batch_size, worker.max_batch_size),
            tokens=worker.max_num_tokens if max_num_tokens == "auto" else min(max_num_tokens, worker.max_num_tokens),
        )

    @staticmethod
    def is_full(queue: FairQueue, limits: Limits) -> bool:
        """Rules 1 and 2: whether what waits fills a batch. When all of it together is over the budget, then whatever the
        order, some input is the one that would take the batch over."""
        return queue.inputs >= limits.inputs or queue.tokens >= limits.tokens

    def due_at(self, queue: FairQueue, *, alone: bool) -> float:
        """Rule 3: when what waits leaves although it fills no batch. ``alone``: the server has no other request, so nobody
        whose company could be near is known. Only while inputs wait."""
        oldest_arrival = queue.oldest_arrival()
        assert oldest_arrival is not None, "nothing waits"
        delay_s = self._settings.max_queue_delay
        if queue.returned:
            return oldest_arrival
        if delay_s == "auto":
            return oldest_arrival if alone else self.arrivals.hold_until(oldest_arrival)
        return oldest_arrival + delay_s
