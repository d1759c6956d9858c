"""The canary: a batch of the broker's own that a worker must answer rightly before it is given a user's input.

A worker gets it when it has said hello, and again when it comes back from a silence. Its only input is a short text that every
worker of the model can encode (``ModelFacts.canary``). The answer must have the size that the facts say, must be finite, and
must be what the workers that passed before have said, as nearly as two devices agree. The first one sets the measure: nobody
here knows what is right, only that equal models must not contradict each other.

These are the only rows that the broker ever decodes.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass

from packhorse_broker.events import SendBatch
from packhorse_shared.codec import Buffer
from packhorse_shared.messages import FIRST_CANARY_ID, BatchFailed, Done, InputFailure, ModelFacts, Work

TOLERANCE = 0.1
"""Largest difference of a value, as a share of the largest value: far above rounding in bfloat16, far below another text."""
LOGIT_SCALE = 1.0
"""What the largest of logits counts for at least: the few of a text may all be near zero, which says nothing of rounding."""
_MOST_VALUES = 1 << 16
"""Rows longer than this are compared in their beginning."""


@dataclass(frozen=True, slots=True)
class Canary:
    """One that is on its way through a worker."""

    batch_id: int
    sent_at: float


class Canaries:
    """Numbers the canaries, and keeps what the right answer is."""

    def __init__(self, boot_id: int) -> None:
        self._boot_id = boot_id
        self._sent = 0
        self._right: tuple[float, ...] | None = None

    def send(self, worker: bytes, facts: ModelFacts, now: float) -> tuple[Canary, SendBatch]:
        """A canary for a worker, and the order to hand it over."""
        canary = Canary(FIRST_CANARY_ID + self._sent, now)
        self._sent += 1
        work = Work(self._boot_id, canary.batch_id, [len(facts.canary)])
        return canary, SendBatch(worker, work, (struct.pack(f"<{len(facts.canary)}i", *facts.canary),))

    def find_fault(self, facts: ModelFacts, answer: Done | BatchFailed, payload: Buffer) -> str | None:
        """What is wrong with an answer of a worker of this model, or None. The first right one is the measure of all others."""
        if isinstance(answer, BatchFailed):
            return _failed(answer)
        if answer.failures:
            return _failed(answer.failures[0])
        size = facts.dimension * (len(facts.canary) if facts.task == "token_reward" else 1)
        if answer.row_values != [size]:
            return f"it has rows of {answer.row_values[:4]} values instead of one of {size}"
        compared = min(size, _MOST_VALUES)
        values = struct.unpack_from(f"<{compared}f", payload)
        if not all(map(math.isfinite, values)):
            return "it is not finite"
        if self._right is None:
            self._right = values
        return _contradiction(values, self._right, 0.0 if facts.task == "embedding" else LOGIT_SCALE)

    def forget(self) -> None:
        """No worker is left that agrees with the measure: the next one sets it anew."""
        self._right = None


def _failed(failure: BatchFailed | InputFailure) -> str:
    return f"it failed ({failure.code.value}): {failure.message}"


def _contradiction(values: tuple[float, ...], right: tuple[float, ...], least_scale: float) -> str | None:
    largest = max(map(abs, right))
    difference = max(abs(one - other) for one, other in zip(values, right, strict=True))
    if difference <= TOLERANCE * max(largest, least_scale):
        return None
    return f"it differs by {difference:.3g} from what other workers of this model gave, whose largest value is {largest:.3g}"
