"""The report for people."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table

from packhorse.bench.comparison import Ratio
from packhorse.bench.report import NAMES, RunReport
from packhorse.bench.summary import ServerReport, Spread
from packhorse_shared.logs import escape

_PIPE_WIDTH = 160
"""Columns when the output is no terminal: wide enough that nothing is cut."""
_MARGIN = 0.02
"""Less is not worth naming a winner."""


def print_report(report: RunReport, *, to_stderr: bool) -> None:
    """Print it; to standard error where standard output is for machines."""
    stream = sys.stderr if to_stderr else sys.stdout
    console = Console(file=stream, width=None if stream.isatty() else _PIPE_WIDTH, highlight=False, markup=False, emoji=False)
    is_comparison = len(report.options["urls"]) == 2
    for name, server in zip(NAMES, report.servers, strict=False):
        console.print(escape(f"{name + '  ' if is_comparison else ''}{server.url}, {server.model or 'model unknown'}"))
    console.print(f"{report.load}\n")
    tables = [_rates(report, is_comparison)]
    tables += [_latencies(report, is_comparison)] if any(map(_spreads, report.servers)) else []
    tables += [_ratios(report.ratios)] if report.ratios else []
    tables += [_failures(report, is_comparison)] if any(each.failures or each.refusal for each in report.servers) else []
    for table in tables:
        console.print(table)
        console.print()
    for note in report.notes:
        console.print(f"note: {note}")


def _table(first: str, *others: str, last: str = "") -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column(first)
    for name in others:
        table.add_column(name, justify="right")
    if last:
        table.add_column(last)
    return table


def _rates(report: RunReport, is_comparison: bool) -> Table:
    table = _table("", "requests/s", "inputs/s", "tokens/s", "answered", "refused", "failed")
    for name, server in zip(NAMES, report.servers, strict=False):
        total = server.total
        rates = (total.requests_per_s, total.inputs_per_s, total.tokens_per_s)
        counts = (total.answered, total.refused, total.failed)
        table.add_row(name if is_comparison else "", *map(_rate, rates), *(f"{count:,}" for count in counts))
    return table


def _latencies(report: RunReport, is_comparison: bool) -> Table:
    table = _table("milliseconds", "mean", "p50", "p90", "p95", "p99", "max")
    for name, server in zip(NAMES, report.servers, strict=False):
        for what, spread in _spreads(server):
            figures = (spread.mean, spread.p50, spread.p90, spread.p95, spread.p99, spread.max)
            table.add_row(f"{name} {what}" if is_comparison else what, *map(_ms, figures))
    return table


def _spreads(server: ServerReport) -> list[tuple[str, Spread]]:
    own = [(f"server: {name}", spread) for name, spread in server.total.server_ms.items()]
    return [("latency", server.total.latency_ms), *own] if server.total.latency_ms is not None else own


def _ratios(ratios: list[Ratio]) -> Table:
    table = _table("A ÷ B", "median", "lowest", "highest", "rounds", last="better")
    for ratio in ratios:
        figures = (f"{value:.2f}" for value in (ratio.median, ratio.lowest, ratio.highest))
        table.add_row(ratio.figure, *figures, str(ratio.rounds), better(ratio))
    return table


def better(ratio: Ratio) -> str:
    """Whose figure is better, where all rounds agree."""
    is_higher, is_lower = ratio.lowest >= 1 + _MARGIN, ratio.highest <= 1 - _MARGIN
    if ratio.rounds < 2 or not (is_higher or is_lower):
        return "not clear"
    return NAMES[0] if is_higher == ratio.is_better_high else NAMES[1]


def _failures(report: RunReport, is_comparison: bool) -> Table:
    table = _table("failures" if any(each.failures for each in report.servers) else "refusals", "count", last="for example")
    for name, server in zip(NAMES, report.servers, strict=False):
        found = [(each.kind, each.count, each.example) for each in server.failures]
        if server.total.refused:
            found.append(("refused (HTTP 429)", server.total.refused, server.refusal))
        for kind, count, example in found:
            table.add_row(f"{name} {kind}" if is_comparison else kind, f"{count:,}", example)
    return table


def _rate(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 else f"{value:.2f}"


def _ms(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.1f}" if value >= 100 else f"{value:.2f}"
