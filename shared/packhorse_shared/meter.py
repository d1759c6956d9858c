"""Counting: every number of every series has a cell, numbered by the table of ``metrics.py``.

A frontend counts in a meter of its own and tells the broker what grew (``Tally``); the broker adds it to its own. So what one
scrape tells is of all processes, and no counter goes back when a frontend dies. Nothing here knows the time.

A histogram's series has a cell for each bucket, not added up, one for what is larger than all bounds, and one for the sum.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Iterator, Sequence
from itertools import accumulate

import msgspec

from packhorse_shared.metrics import FRONTEND_METRICS, METRICS, Metric


class Buckets(msgspec.Struct, frozen=True):
    """Where the cells of one series of a histogram are."""

    first: int
    bounds: tuple[float, ...]
    sum_cell: int


def _width(metric: Metric) -> int:
    """Cells of one series."""
    return len(metric.bounds) + 2 if metric.kind == "histogram" else 1


def _ends(metrics: Sequence[Metric]) -> list[int]:
    return list(accumulate((len(metric.series) * _width(metric) for metric in metrics), initial=0))


CELLS = _ends(METRICS)[-1]
FRONTEND_CELLS = _ends(FRONTEND_METRICS)[-1]
"""The first cells are those that a frontend may tell of."""
_FIRST = {metric.name: first for metric, first in zip(METRICS, _ends(METRICS), strict=False)}


def cell_of(metric: Metric, *values: str) -> int:
    """The cell of a counter or gauge with these label values. Look it up once, not for each count."""
    assert metric.kind != "histogram", f"{metric.name} is a histogram"
    return _FIRST[metric.name] + metric.series.index(values)


def cells_of(metric: Metric) -> dict[str, int]:
    """The cells of a counter or gauge with one label, by its value."""
    return {value: cell_of(metric, value) for (value,) in metric.series}


def buckets_of(metric: Metric, *values: str) -> Buckets:
    """The cells of a histogram with these label values. Look them up once, not for each observation."""
    assert metric.kind == "histogram", f"{metric.name} is no histogram"
    first = _FIRST[metric.name] + metric.series.index(values) * _width(metric)
    return Buckets(first, metric.bounds, first + len(metric.bounds) + 1)


class Meter:
    """The cells. Not for several threads: an addition may be lost between two."""

    def __init__(self) -> None:
        self.values = [0.0] * CELLS

    def count(self, cell: int, by: float = 1.0) -> None:
        """A counter grows."""
        self.values[cell] += by

    def observe(self, buckets: Buckets, value: float, times: int = 1) -> None:
        """A histogram takes in one value, or the same one several times."""
        self.values[buckets.first + bisect_left(buckets.bounds, value)] += times
        self.values[buckets.sum_cell] += value * times

    def add(self, changes: Iterable[tuple[int, float]]) -> None:
        """Take in what grew elsewhere."""
        for cell, amount in changes:
            self.values[cell] += amount

    def take_changes(self) -> list[tuple[int, float]]:
        """(cell, amount) of all that grew since the last call, and begin anew. Only what a frontend may tell of."""
        changes = [(cell, amount) for cell, amount in enumerate(self.values[:FRONTEND_CELLS]) if amount]
        for cell, _ in changes:
            self.values[cell] = 0.0
        return changes


class Reading(msgspec.Struct, frozen=True):
    """One series with its numbers."""

    labels: tuple[str, ...]
    """Their values."""
    value: float
    """Of a histogram: the sum of what was observed."""
    counts: tuple[float, ...] = ()
    """Of a histogram: how much lies at or below each bound, and last of all how much there is."""


def readings_of(metric: Metric, values: Sequence[float]) -> Iterator[Reading]:
    """The series of a metric. ``values``: all cells."""
    width = _width(metric)
    for position, labels in enumerate(metric.series):
        first = _FIRST[metric.name] + position * width
        if metric.kind == "histogram":
            yield Reading(labels, values[first + width - 1], tuple(accumulate(values[first : first + width - 1])))
        else:
            yield Reading(labels, values[first])


def count_series() -> int:
    """How many series Prometheus sees: for a histogram one for each bucket, the sum and the count."""
    return sum(len(metric.series) * (len(metric.bounds) + 3 if metric.bounds else 1) for metric in METRICS)
