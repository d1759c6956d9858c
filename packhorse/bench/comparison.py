"""Two servers side by side: ratios of the slices that ran one after the other, so that a machine that slows down slows both."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import msgspec

from packhorse.bench.summary import Figures


class Ratio(msgspec.Struct, frozen=True):
    """One figure of the first server, as a multiple of the second's."""

    figure: str
    is_better_high: bool
    median: float
    """Of the rounds."""
    lowest: float
    highest: float
    rounds: int
    """Those in which both servers have the figure."""


def compare(ours: Sequence[Figures], theirs: Sequence[Figures]) -> list[Ratio]:
    """Ratios round by round; a figure that no round has for both is left out."""
    found = []
    rounds = [(_compared(one), _compared(other)) for one, other in zip(ours, theirs, strict=False)]
    for name in _compared(ours[0]):
        pairs = [(one[name], other[name]) for one, other in rounds]
        ratios = [one / other for one, other in pairs if one and other]
        if ratios:
            is_better_high = name.endswith("/s")
            found.append(Ratio(name, is_better_high, statistics.median(ratios), min(ratios), max(ratios), len(ratios)))
    return found


def _compared(figures: Figures) -> dict[str, float | None]:
    """What is compared of a slice."""
    latency = figures.latency_ms
    compared: dict[str, float | None] = {"requests/s": figures.requests_per_s, "tokens/s": figures.tokens_per_s}
    for name in ("mean", "p50", "p95", "p99"):
        compared[f"latency {name}"] = None if latency is None else getattr(latency, name)
    return compared
