"""Who is let in, and how long waiting would take.

A request is admitted whole or refused whole. Refusals cost next to nothing: under overload they are quick, and what was
accepted keeps its latency.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from packhorse_broker.leases import Capacity
from packhorse_shared.messages import ErrorCode

MAX_HELD_BYTES = 1 << 30
"""Most bytes of token ids that live requests may hold together."""
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
    """Seconds until ``inputs`` waiting inputs with ``tokens`` tokens are under way, from what full batches took lately.

    None while no full batch was seen. Counted in tokens, and in batches of the size limits; the smaller one is taken, because
    a wrongly refused request is worse than a late one, whose own timeout still holds.
    """
    if capacity.tokens_per_s is None or capacity.batches_per_s is None:
        return None
    batches = max(inputs / capacity.largest.inputs, tokens / capacity.largest.tokens)
    return min(tokens / capacity.tokens_per_s, batches / capacity.batches_per_s)


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
