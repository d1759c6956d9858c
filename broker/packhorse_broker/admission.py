"""Who is let in, and how long waiting would take.

A request is admitted whole or refused whole. Refusals cost next to nothing: under overload they are quick, and what was
accepted keeps its latency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from packhorse_broker.leases import Capacity
from packhorse_broker.quarantine import KEPT_S
from packhorse_broker.retries import MAX_ATTEMPTS
from packhorse_shared.messages import ErrorCode

MAX_HELD_BYTES = 1 << 30
"""Most bytes of token ids that live requests may hold together."""
WAIT_SHARE = 0.95
"""Of a request's time that the estimated wait may take. Under overload the queue is as long as the estimate allows, and without
a margin half of those who are let in would be late by a little."""
LONGEST_RETRY_AFTER_S = 30
NO_WORKER_RETRY_AFTER_S = 5
"""About what a worker takes to restart and load."""


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a request is not let in."""

    code: ErrorCode
    message: str
    retry_after_s: int = 0
    index: int | None = None


def estimated_wait_s(inputs: int, tokens: int, capacity: Capacity) -> float | None:
    """Seconds until a new request has its answer that comes behind ``inputs`` waiting inputs with ``tokens`` tokens, from what
    full batches took lately.

    None while no full batch was seen, 0 while nothing waits. What waits is counted in tokens, and in batches of the size
    limits; the smaller one is taken, because a wrongly refused request is worse than a late one, whose own timeout still holds.
    Behind it come what the workers hold, about one batch each, and the request's own batch.
    """
    if capacity.tokens_per_s is None or capacity.batches_per_s is None:
        return None
    if not inputs:
        return 0.0
    batches = max(inputs / capacity.largest.inputs, tokens / capacity.largest.tokens)
    batch_s = capacity.workers / capacity.batches_per_s
    return min(tokens / capacity.tokens_per_s, batches / capacity.batches_per_s) + 2 * batch_s


def retry_after_s(wait_s: float | None) -> int:
    """The hint that goes with a refusal: the estimated wait in whole seconds, 1 to 30."""
    return 1 if wait_s is None else max(1, min(LONGEST_RETRY_AFTER_S, math.ceil(wait_s)))


def too_long(lengths: list[int], limit: int) -> Refusal | None:
    """Refuses a request with an input that fits no worker's batch."""
    longest = max(lengths)
    if longest <= limit:
        return None
    index = next(position for position, length in enumerate(lengths) if length > limit)
    return Refusal(
        ErrorCode.INPUT_TOO_LONG,
        f"input {index} has {lengths[index]} tokens, more than the {limit} that fit one batch (max_num_tokens)",
        index=index,
    )


def in_quarantine(index: int) -> Refusal:
    """Refuses a request with an input that was found to make workers die."""
    return Refusal(
        ErrorCode.WORKER_DIED,
        f"input {index} made {MAX_ATTEMPTS} workers die; it is not tried again for {KEPT_S / 60:.0f} minutes after that",
        index=index,
    )
