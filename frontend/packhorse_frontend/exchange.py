"""What is open between this frontend and the broker: no sockets, no clock.

The frontend owns its requests: here it is decided what is sent for them, what an answer of the broker is worth, and when a
request is complete. A row counts only if its request is open, its index is one that still misses, and its size is the
model's (for the input's length, where a model gives values for each token); a request ends exactly once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np

from packhorse_frontend.bodies.inputs import Ids
from packhorse_frontend.rows import Rows, RowShape
from packhorse_shared.codec import MAX_HEADER_BYTES, Buffer
from packhorse_shared.messages import (
    Cancel,
    EncodeOptions,
    ErrorCode,
    RequestFailure,
    RequestRows,
    Result,
    Submit,
    SubmittedRequest,
)

_REQUEST_HEADER_BYTES = 40
_LENGTH_HEADER_BYTES = 5
"""Upper bounds of what one request, and one length, take in a header: a length is at most a msgpack uint32."""
_ROOM_BYTES = MAX_HEADER_BYTES - 64
_RIDS_PER_CANCEL = 5_000
_NO_OPTIONS = EncodeOptions()

_NO_ROW: Rows = np.empty(0, dtype=np.float32)

Answer = Rows | list[Rows]
"""The rows of a request: float32 ``[inputs, dimension]``, or one array for each input where their sizes differ."""


@dataclass
class OpenRequest:
    """One request that was accepted and not yet answered."""

    rid: int
    ids: Ids
    lengths: Sequence[int]
    deadline: float
    """By the event loop's clock."""
    shape: RowShape
    """What each row must have."""
    priority: int = 0
    options: EncodeOptions = _NO_OPTIONS
    was_sent: bool = False
    is_resubmitted: bool = False
    missing: int = field(init=False)
    has_row: bytearray = field(init=False)
    rows: Answer | None = None
    queue_ms: float = 0.0
    encode_ms: float = 0.0

    def __post_init__(self) -> None:
        self.start_over()

    def start_over(self) -> None:
        """Forget the rows that came, since all of them will come again."""
        self.missing = len(self.lengths)
        self.has_row = bytearray(len(self.lengths))

    def split(self, values: Rows, sizes: Sequence[int]) -> Sequence[Rows] | Rows:
        """The rows of some inputs, joined in ``values``, by their sizes. Rows for each token are copied, so that they can be
        kept when the message that they came in goes."""
        if not self.shape.per_token:
            return values.reshape(-1, self.shape.dimension)
        return [row.copy() for row in np.split(values, np.cumsum(sizes)[:-1])]

    def make_room(self) -> Answer:
        """Where the rows go."""
        if self.rows is None:
            count, dimension = len(self.lengths), self.shape.dimension
            self.rows = [_NO_ROW] * count if self.shape.per_token else np.empty((count, dimension), dtype=np.float32)
        return self.rows


@dataclass(frozen=True)
class Encoded:
    """The rows of all inputs of a request, in their order, and what they took."""

    rows: Answer
    queue_ms: float
    """Longest wait in the queue of any input."""
    encode_ms: float
    """Longest forward pass of any input."""


@dataclass(frozen=True)
class Answered:
    """All rows of a request are there."""

    rid: int
    encoded: Encoded


Ending = Answered | RequestFailure


class Exchange:
    """The open requests by rid, and what has yet to be sent for them."""

    def __init__(self) -> None:
        self._open: dict[int, OpenRequest] = {}
        self._to_submit: dict[int, OpenRequest] = {}
        self._to_cancel: list[int] = []
        self.duplicate_rows = 0
        """Rows that came a second time, and were ignored."""

    def __len__(self) -> int:
        return len(self._open)

    def open(self, request: OpenRequest) -> None:
        """A request is to be sent."""
        self._open[request.rid] = request
        self._to_submit[request.rid] = request

    def give_up(self, rid: int) -> None:
        """Nobody waits for this request any more: if the broker has it, tell it so. Unknown rids are those that ended."""
        request = self._open.pop(rid, None)
        if request is None:
            return
        self._to_submit.pop(rid, None)
        if request.was_sent:
            self._to_cancel.append(rid)

    def resubmit(self) -> None:
        """The broker is a new one, or forgot us: everything open is to be sent again."""
        for request in self._open.values():
            if request.was_sent:
                request.start_over()
                request.is_resubmitted = True
                self._to_submit[request.rid] = request
        self._to_cancel.clear()

    def take_submits(self, now: float) -> list[tuple[Submit, Buffer]]:
        """Messages for all that is to be submitted, each with a header within the protocol's limit."""
        messages: list[tuple[Submit, Buffer]] = []
        requests: list[OpenRequest] = []
        room = _ROOM_BYTES
        for request in self._to_submit.values():
            needed = _REQUEST_HEADER_BYTES + _LENGTH_HEADER_BYTES * len(request.lengths)
            if requests and needed > room:
                messages.append(_submit(requests, now))
                requests, room = [], _ROOM_BYTES
            requests.append(request)
            room -= needed
        if requests:
            messages.append(_submit(requests, now))
        self._to_submit.clear()
        return messages

    def take_cancels(self) -> list[Cancel]:
        """Messages for all requests that were given up."""
        rids, self._to_cancel = self._to_cancel, []
        return [Cancel(rids[start : start + _RIDS_PER_CANCEL]) for start in range(0, len(rids), _RIDS_PER_CANCEL)]

    def on_failure(self, failure: RequestFailure) -> list[Ending]:
        """The broker gave a request up."""
        self._to_submit.pop(failure.rid, None)
        return [failure] if self._open.pop(failure.rid, None) is not None else []

    def on_result(self, result: Result, payload: Buffer) -> list[Ending]:
        """Rows came. The codec has checked that the payload has as many bytes as the header says."""
        values = np.frombuffer(payload, dtype="<f4")
        endings: list[Ending] = []
        start = 0
        for part in result.requests:
            end = start + sum(part.row_values)
            ending = self._take_rows(part, values[start:end])
            if ending is not None:
                endings.append(ending)
            start = end
        return endings

    def _take_rows(self, part: RequestRows, values: Rows) -> Ending | None:
        request = self._open.get(part.rid)
        if request is None:
            return None
        problem = _find_fault(part, request)
        if problem is not None:
            return self._fail(request, ErrorCode.FORWARD_FAILED, problem, None)
        rows = request.split(values, part.row_values)
        if not np.isfinite(values).all():
            bad = next(index for index, row in zip(part.indexes, rows, strict=True) if not np.isfinite(row).all())
            message = "the model's output for this input is not finite"
            return self._fail(request, ErrorCode.NON_FINITE_OUTPUT, message, bad)
        request.queue_ms = max(request.queue_ms, part.queue_ms)
        request.encode_ms = max(request.encode_ms, part.encode_ms)
        kept = request.make_room()
        for index, row in zip(part.indexes, rows, strict=True):
            if request.has_row[index]:
                self.duplicate_rows += 1
                continue
            request.has_row[index] = 1
            request.missing -= 1
            kept[index] = row
        if request.missing:
            return None
        del self._open[request.rid]
        self._to_submit.pop(request.rid, None)
        return Answered(request.rid, Encoded(kept, request.queue_ms, request.encode_ms))

    def _fail(self, request: OpenRequest, code: ErrorCode, message: str, index: int | None) -> RequestFailure:
        self.give_up(request.rid)
        return RequestFailure(request.rid, code, message, 0, index)


def _find_fault(part: RequestRows, request: OpenRequest) -> str | None:
    """What is wrong with the header of some rows, if anything is."""
    if len(part.indexes) != len(part.row_values):
        return f"the broker sent {len(part.row_values)} rows for {len(part.indexes)} inputs"
    if max(part.indexes) >= len(request.lengths):
        return f"the broker sent a row for input {max(part.indexes)} of {len(request.lengths)}"
    shape, lengths = request.shape, request.lengths
    sizes = [shape.values(lengths[index]) for index in part.indexes] if shape.per_token else repeat(shape.dimension)
    wrong = next(((size, right) for size, right in zip(part.row_values, sizes, strict=False) if size != right), None)
    return None if wrong is None else f"the worker sent a row of {wrong[0]} values, the model has {wrong[1]}"


def _submit(requests: Sequence[OpenRequest], now: float) -> tuple[Submit, Buffer]:
    submitted = []
    for request in requests:
        request.was_sent = True
        submitted.append(
            SubmittedRequest(
                request.rid,
                list(request.lengths),
                max(0, int((request.deadline - now) * 1000)),
                request.priority,
                request.options,
                request.is_resubmitted,
            )
        )
    parts = [request.ids.astype("<i4", copy=False).data.cast("B") for request in requests]
    return Submit(submitted), parts[0] if len(parts) == 1 else b"".join(parts)
