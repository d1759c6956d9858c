"""What the broker counts of itself, in the cells of the shared meter. The numbers that are looked up are in ``gauges.py``."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable

from packhorse_broker.fairness import Limits
from packhorse_broker.requests import Request
from packhorse_shared import metrics
from packhorse_shared.messages import ErrorCode
from packhorse_shared.meter import Meter, buckets_of, cell_of, cells_of

RETRIES = cell_of(metrics.RETRIES)
SILENCES = cell_of(metrics.SILENCES)
CANARY_FAILURES = cell_of(metrics.CANARY_FAILURES)
MALFORMED = cell_of(metrics.MALFORMED)
WORKER_EXITS = cells_of(metrics.WORKER_EXITS)

_INPUTS = cell_of(metrics.INPUTS)
_TOKENS = cell_of(metrics.TOKENS)
_QUEUE_WAIT = buckets_of(metrics.QUEUE_WAIT_SECONDS)
_BATCH_INPUTS = buckets_of(metrics.BATCH_INPUTS)
_BATCH_TOKENS = buckets_of(metrics.BATCH_TOKENS)
_FILL_RATIO = buckets_of(metrics.BATCH_FILL_RATIO)
_ENCODE = buckets_of(metrics.ENCODE_SECONDS)
_FAILED = cells_of(metrics.FAILED)
_REJECTED = cells_of(metrics.REJECTED)
_REJECTED_BY_CODE = {
    ErrorCode.QUEUE_FULL: _REJECTED["queue_full"],
    ErrorCode.WAIT_TOO_LONG: _REJECTED["wait_too_long"],
    ErrorCode.NO_WORKER: _REJECTED["no_worker"],
    ErrorCode.LOADING: _REJECTED["loading"],
    ErrorCode.DRAINING: _REJECTED["draining"],
    ErrorCode.WORKER_DIED: _REJECTED["quarantine"],
    ErrorCode.INPUT_TOO_LONG: _REJECTED["too_long"],
    ErrorCode.TIMEOUT: _REJECTED["too_late"],
}
"""The codes that a ``Refusal`` has."""


def rejected(meter: Meter, code: ErrorCode) -> None:
    """A request was not let in."""
    meter.count(_REJECTED_BY_CODE.get(code, _REJECTED[metrics.OTHER]))


def failed(meter: Meter, code: ErrorCode) -> None:
    """A request that was let in failed."""
    meter.count(_FAILED.get(code.value, _FAILED[metrics.OTHER]))


def handed_over(meter: Meter, inputs: int, tokens: int, limits: Limits) -> None:
    """A batch goes to a worker with these limits."""
    # Written out, here and below, what ``Meter.observe`` does: this runs for every batch, and calls are what it would cost.
    values = meter.values
    values[_BATCH_INPUTS.first + bisect_left(_BATCH_INPUTS.bounds, inputs)] += 1
    values[_BATCH_INPUTS.sum_cell] += inputs
    values[_BATCH_TOKENS.first + bisect_left(_BATCH_TOKENS.bounds, tokens)] += 1
    values[_BATCH_TOKENS.sum_cell] += tokens
    fill = max(inputs / limits.inputs, tokens / limits.tokens)
    values[_FILL_RATIO.first + bisect_left(_FILL_RATIO.bounds, fill)] += 1
    values[_FILL_RATIO.sum_cell] += fill


def came_back(meter: Meter, sent_at: float, encode_ms: float, answered: Iterable[tuple[Request, int, int]]) -> None:
    """A batch has run, and answers these: (request, inputs, tokens) each."""
    values = meter.values
    encode_s = encode_ms / 1000
    values[_ENCODE.first + bisect_left(_ENCODE.bounds, encode_s)] += 1
    values[_ENCODE.sum_cell] += encode_s
    all_inputs = all_tokens = bucket = 0
    arrived, waited_s, all_waited_s = float("-inf"), 0.0, 0.0
    for request, inputs, tokens in answered:
        all_inputs += inputs
        all_tokens += tokens
        if request.arrived != arrived:  # neighbours often came in one message
            arrived = request.arrived
            waited_s = sent_at - arrived
            bucket = _QUEUE_WAIT.first + bisect_left(_QUEUE_WAIT.bounds, waited_s)
        values[bucket] += inputs
        all_waited_s += inputs * waited_s
    values[_QUEUE_WAIT.sum_cell] += all_waited_s
    values[_INPUTS] += all_inputs
    values[_TOKENS] += all_tokens
