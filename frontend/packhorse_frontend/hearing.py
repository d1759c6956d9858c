"""Whether the broker is silent, as far as this process could have heard it.

A process that was stopped, or whose event loop was held up, looks at its clock before its socket's thread has read anything: by
the clock alone a healthy broker would count as gone. So only time in which we ran counts as silence.
"""

from __future__ import annotations

from packhorse_shared.messages import PING_INTERVAL_S

SILENCE_S = 1.0
"""A broker that says nothing for so long counts as gone."""
_STALL_S = 2 * PING_INTERVAL_S
"""A longer time between two looks is one in which we did not run. Of such a time one interval counts: an event loop that is
always late still finds out."""


class Hearing:
    """When the broker was heard last. Times are seconds of one monotonic clock; call ``look`` every ping interval."""

    def __init__(self) -> None:
        self._heard_at = float("-inf")
        self._looked_at = float("inf")

    def hear(self, now: float) -> None:
        """Something came from the broker."""
        self._heard_at = now

    def look(self, now: float) -> bool:
        """Whether the broker was heard within the last second that we had."""
        gap_s = now - self._looked_at
        if gap_s > _STALL_S:
            self._heard_at = min(now, self._heard_at + gap_s - PING_INTERVAL_S)
        self._looked_at = now
        return now - self._heard_at <= SILENCE_S
