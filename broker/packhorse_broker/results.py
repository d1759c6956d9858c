"""From a worker's rows to one message per frontend. Payloads are cut and joined, never decoded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate

from packhorse_broker.events import Payload, SendResult
from packhorse_broker.leases import Batch
from packhorse_broker.requests import Request
from packhorse_shared.codec import Buffer
from packhorse_shared.messages import BYTES_PER_VALUE, Done, ErrorCode, InputFailure, RequestRows, Result

_MOST_HEADER_BYTES = 60_000
"""A header may have 64 KiB; a batch of very many small requests is told in several messages."""
_BYTES_PER_REQUEST = 40
_BYTES_PER_INPUT = 8
"""What an entry of ``Result`` takes at most: rid, two doubles and array heads; index and row size."""

_DEFAULT_MESSAGES = {
    ErrorCode.NON_FINITE_OUTPUT: "the model's output for this input is not finite",
    ErrorCode.FORWARD_FAILED: "the model failed on this input",
    ErrorCode.OUT_OF_MEMORY: "the device ran out of memory on this input",
}


@dataclass(frozen=True, slots=True)
class OutgoingResult:
    """One message, and what it answers: (request, inputs, tokens) each."""

    action: SendResult
    answered: list[tuple[Request, int, int]]


def failures_of(batch: Batch, done: Done) -> Iterator[InputFailure]:
    """The inputs of a batch that failed: those the worker names, and those for which it gave no row."""
    named = {failure.index: failure for failure in done.failures if failure.index < len(batch.items)}
    for position, values in enumerate(done.row_values):
        failure = named.get(position)
        if failure is not None:
            yield failure if failure.message else InputFailure(position, failure.code, _default_message(failure.code))
        elif values == 0:
            yield InputFailure(position, ErrorCode.FORWARD_FAILED, _default_message(ErrorCode.FORWARD_FAILED))


def results_of(batch: Batch, done: Done, payload: Buffer) -> Iterator[OutgoingResult]:
    """One message per frontend whose requests rode in the batch. Inputs of closed requests are left out."""
    by_frontend: dict[bytes, dict[Request, list[int]]] = {}
    for position, (request, _) in enumerate(batch.items):
        if not request.closed:
            by_frontend.setdefault(request.frontend, {}).setdefault(request, []).append(position)
    if not by_frontend:
        return
    rows = memoryview(payload)
    starts = list(accumulate(done.row_values, initial=0))
    for frontend, by_request in by_frontend.items():
        for requests in _messages(by_request):
            entries, answered = _entries(batch, done, requests)
            cut = _cut(rows, starts, [position for _, positions in requests for position in positions])
            yield OutgoingResult(SendResult(frontend, Result(entries), cut), answered)


def _messages(by_request: dict[Request, list[int]]) -> Iterator[list[tuple[Request, list[int]]]]:
    """Requests in portions whose header surely fits."""
    portion: list[tuple[Request, list[int]]] = []
    size = 0
    for request, positions in by_request.items():
        size += _BYTES_PER_REQUEST + _BYTES_PER_INPUT * len(positions)
        if portion and size > _MOST_HEADER_BYTES:
            yield portion
            portion, size = [], _BYTES_PER_REQUEST + _BYTES_PER_INPUT * len(positions)
        portion.append((request, positions))
    yield portion


def _entries(
    batch: Batch, done: Done, requests: list[tuple[Request, list[int]]]
) -> tuple[list[RequestRows], list[tuple[Request, int, int]]]:
    entries, answered = [], []
    items, values = batch.items, done.row_values
    for request, positions in requests:
        indexes = [items[position][1] for position in positions]
        entries.append(
            RequestRows(
                rid=request.rid,
                indexes=indexes,
                row_values=[values[position] for position in positions],
                queue_ms=1000 * (batch.sent_at - request.arrived),
                encode_ms=done.encode_ms,
            )
        )
        answered.append((request, len(indexes), sum(request.lengths[index] for index in indexes)))
    return entries, answered


def _cut(rows: memoryview, starts: list[int], positions: list[int]) -> Payload:
    """The rows at these positions, neighbours in one piece."""
    pieces = []
    first = last = positions[0]
    for position in positions[1:]:
        if position != last + 1:
            pieces.append(rows[BYTES_PER_VALUE * starts[first] : BYTES_PER_VALUE * starts[last + 1]])
            first = position
        last = position
    pieces.append(rows[BYTES_PER_VALUE * starts[first] : BYTES_PER_VALUE * starts[last + 1]])
    return tuple(pieces)


def _default_message(code: ErrorCode) -> str:
    return _DEFAULT_MESSAGES.get(code, f"this input failed ({code.value})")
