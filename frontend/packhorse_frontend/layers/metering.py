"""What a frontend counts: every request once, whoever answers it, and how long those take that are worked on.

The endpoint and the status of a request come from fixed lists. Nothing else of it counts: whatever paths, methods, models and
keys clients send, no series is ever added.
"""

from __future__ import annotations

from packhorse_frontend.layers.following import EndedRequest
from packhorse_frontend.problems import Problem
from packhorse_shared.meter import Meter, buckets_of, cell_of, cells_of
from packhorse_shared.metrics import (
    OTHER,
    REJECTED,
    REQUEST_SECONDS,
    REQUESTS,
    STATUSES,
    TIMED_ENDPOINTS,
    TIMED_STATUSES,
    TOKENIZE_SECONDS,
    TRUNCATED_INPUTS,
)

_CELLS = {
    endpoint: {int(status): cell_of(REQUESTS, endpoint, status) for status in statuses.split() if status != OTHER}
    for endpoint, statuses in STATUSES.items()
}
_OTHER_CELLS = {endpoint: cell_of(REQUESTS, endpoint, OTHER) for endpoint in STATUSES}
_SECONDS = {endpoint: buckets_of(REQUEST_SECONDS, endpoint) for endpoint in TIMED_ENDPOINTS}
_REJECTED = cells_of(REJECTED)
_TOKENIZE = buckets_of(TOKENIZE_SECONDS)
_TRUNCATED = cell_of(TRUNCATED_INPUTS)


def count_request(meter: Meter, endpoint: str, status: int) -> None:
    """A request is over."""
    meter.count(_CELLS[endpoint].get(status, _OTHER_CELLS[endpoint]))


def count_tokenized(meter: Meter, took_s: float) -> None:
    """The texts of a request were tokenized."""
    meter.observe(_TOKENIZE, took_s)


def count_truncated(meter: Meter, inputs: int) -> None:
    """So many inputs of a request were cut, since it allowed that."""
    meter.count(_TRUNCATED, inputs)


def count_rejection(meter: Meter, problem: Problem) -> None:
    """A request is answered with this; it counts as rejected if the state of the server is why."""
    if problem.is_rejection and not problem.is_expected:
        meter.count(_REJECTED.get(problem.code or OTHER, _REJECTED[OTHER]))


def count_refusal(meter: Meter, problem: Problem) -> None:
    """A connection was refused before there was a request on it: nobody knows which endpoint was meant."""
    count_request(meter, OTHER, problem.status)
    count_rejection(meter, problem)


def count_ended(meter: Meter, request: EndedRequest) -> None:
    """A request is over; see ``following.py``."""
    count_request(meter, request.endpoint, request.status)
    if request.status in TIMED_STATUSES and request.endpoint in _SECONDS:
        meter.observe(_SECONDS[request.endpoint], request.ended - request.began)
