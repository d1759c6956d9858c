"""The picture of a run: how latencies are spread, and throughput and latency over time; two servers in the same panels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FixedFormatter, FixedLocator, NullFormatter, StrMethodFormatter

from packhorse.bench.report import NAMES, RunReport
from packhorse.bench.samples import Samples
from packhorse.bench.summary import Values, latencies_s
from packhorse.bench.target import Target

_COLOURS = ("#2563a8", "#d9731a")
_INK, _GREY, _LINES = "#111827", "#4b5563", "#e5e7eb"
_MOST_POINTS = 60
_MOST_STEPS = 1000
"""Of the curve of percentiles, of equal length to the eye."""
_NARROWEST_S = 0.25
_FEWEST_ANSWERS = 10
"""Of a point in time, on average: with fewer, points show chance."""
_PERCENTILES = (0.5, 0.9, 0.99, 0.999, 0.9999, 0.99999)


def draw(report: RunReport, measured: Sequence[tuple[Target, list[Samples]]], path: Path) -> None:
    """Write the picture; the file's ending says in which format. Raises OSError."""
    figure = Figure(figsize=(12, 6.4), layout="constrained")
    panels = figure.subplot_mosaic([["spread", "rate"], ["spread", "time"]], width_ratios=(1, 1.15))
    began_at = min(each.begun_at for _, slices in measured for each in slices)
    for name, colour, (target, slices) in zip(NAMES, _COLOURS, measured, strict=False):
        label = _plain(f"{name}: {target.url}" if len(measured) > 1 else target.url)
        _draw_spread(panels["spread"], slices, colour, label)
        _draw_times(panels["rate"], panels["time"], slices, began_at, colour)
    _dress(panels["spread"], "Latency by percentile", "percentile of requests", "latency [ms]")
    _dress(panels["rate"], "Answered requests over time", "", "requests per second")
    _dress(panels["time"], "Latency over time: p50 solid, p99 dotted", "seconds since the start", "latency [ms]")
    panels["rate"].sharex(panels["time"])
    panels["rate"].set_ylim(bottom=0)
    _percentile_axis(panels["spread"])
    for name in ("spread", "time"):
        _latency_axis(panels[name])
    figure.suptitle(_plain(report.load), x=0.01, ha="left", fontsize=11, color=_INK)
    figure.legend(loc="outside lower left", ncols=2, frameon=False, fontsize=10, labelcolor=_GREY)
    figure.savefig(path, dpi=130, facecolor="white")


def _plain(text: str) -> str:
    """Text that is not read as a formula."""
    return text.replace("$", r"\$")


def _draw_spread(panel: Axes, slices: Sequence[Samples], colour: str, label: str) -> None:
    """Every answer from the fastest to the slowest, the tail stretched: each step to the right has a tenth of the requests."""
    latencies_ms = np.sort(1000 * np.concatenate([latencies_s(each) for each in slices]))
    count = len(latencies_ms)
    # The rank's middle: of n answers the slowest stands for the last 1/(2n), and no point lies at 100 %, which is infinite.
    shares = (np.arange(count) + 0.5) / max(count, 1)
    kept = np.unique((count - np.geomspace(1, max(count, 1), _MOST_STEPS)).astype(int)) if count else np.arange(0)
    panel.plot(-np.log10(1 - shares[kept]), latencies_ms[kept], color=colour, linewidth=1.8, label=label)


def _draw_times(rate: Axes, time: Axes, slices: Sequence[Samples], began_at: float, colour: str) -> None:
    seconds = sum(each.stopped_at - each.begun_at for each in slices)
    width_s = max(_NARROWEST_S, seconds / _MOST_POINTS)
    for samples in slices:
        at_s, rates, p50_ms, p99_ms = _over_time(samples, width_s)
        at_s += samples.begun_at - began_at
        dots: dict[str, Any] = {"color": colour, "marker": "o", "markersize": 3}
        rate.plot(at_s, rates, linewidth=1.6, **dots)
        is_known = np.isfinite(p50_ms)
        time.plot(at_s[is_known], p50_ms[is_known], linewidth=1.6, **dots)
        hollow = {**dots, "markerfacecolor": "white"}
        time.plot(at_s[is_known], p99_ms[is_known], linewidth=1.2, linestyle=(0, (1, 1.5)), **hollow)


def _over_time(samples: Samples, width_s: float) -> tuple[Values, Values, Values, Values]:
    """The middles of equal parts of a slice, in seconds; requests/s, p50 and p99 in ms of what ended in each (NaN: nothing)."""
    seconds = samples.stopped_at - samples.begun_at
    parts = max(1, min(round(seconds / width_s), samples.answered // _FEWEST_ANSWERS))
    ended = np.asarray(samples.ended, dtype=np.float64)
    part = np.minimum((ended / seconds * parts).astype(int), parts)  # what ended after the slice is in no part
    latencies_ms = 1000 * latencies_s(samples)
    inside = [latencies_ms[part == number] for number in range(parts)]
    percentiles = np.array([np.percentile(each, (50, 99)) if len(each) else (np.nan, np.nan) for each in inside])
    rates = np.array([len(each) for each in inside]) * parts / seconds
    return (np.arange(parts) + 0.5) * seconds / parts, rates, percentiles[:, 0], percentiles[:, 1]


def _dress(panel: Axes, title: str, x_label: str, y_label: str) -> None:
    panel.set_title(title, fontsize=11, loc="left", color=_INK)
    panel.set_xlabel(x_label, fontsize=9, color=_GREY)
    panel.set_ylabel(y_label, fontsize=9, color=_GREY)
    panel.tick_params(axis="both", which="both", length=0, labelsize=9, labelcolor=_GREY)
    panel.grid(color=_LINES, linewidth=0.8)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color("#d1d5db")


def _percentile_axis(panel: Axes) -> None:
    panel.xaxis.set_major_locator(FixedLocator([-math.log10(1 - each) for each in _PERCENTILES]))
    panel.xaxis.set_major_formatter(FixedFormatter([f"{100 * each:.5g} %" for each in _PERCENTILES]))
    panel.set_xlim(left=0)


def _latency_axis(panel: Axes) -> None:
    """From 0 where that shows everything; in powers of ten where a tail, or the other server, is much longer than the rest."""
    lines = [np.asarray(line.get_ydata(), dtype=np.float64) for line in panel.lines]
    medians = [float(np.median(line)) for line in lines if len(line)]
    if medians and min(medians) > 0 and max(line.max() for line in lines if len(line)) > 20 * min(medians):
        panel.set_yscale("log")
        panel.yaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
        panel.yaxis.set_minor_formatter(NullFormatter())
    else:
        panel.set_ylim(bottom=0)
