"""Write the tables of docs/metrics.md from the table of metrics. ``python docs/make_metrics.py``; a test compares."""

from __future__ import annotations

from pathlib import Path

from packhorse_shared import metrics
from packhorse_shared.meter import count_series

PAGE = Path(__file__).with_name("metrics.md")
BEGIN = "<!-- python docs/make_metrics.py writes from here -->\n"
END = "<!-- to here -->\n"


def page() -> str:
    """The whole page: what was written by hand, around what is made here."""
    before, _, rest = PAGE.read_text(encoding="utf-8").partition(BEGIN)
    _, _, after = rest.partition(END)
    return "".join((before, BEGIN, *_tables(), END, after))


def _tables() -> list[str]:
    lines = ["| metric | kind | unit | labels | what it is | it moves when |\n|---|---|---|---|---|---|\n"]
    lines += [_row(metric) for metric in metrics.METRICS]
    lines += [f"\nThese are {count_series()} series, always.\n"]
    lines += ["\n| endpoint | its statuses |\n|---|---|\n"]
    lines += [f"| `{endpoint}` | {', '.join(statuses.split())} |\n" for endpoint, statuses in metrics.STATUSES.items()]
    lines += ["\n| histogram | upper bounds of its buckets |\n|---|---|\n"]
    lines += [
        f"| `{metric.name}` | {', '.join(f'{bound:g}' for bound in metric.bounds)} |\n"
        for metric in metrics.METRICS
        if metric.bounds
    ]
    return lines


def _row(metric: metrics.Metric) -> str:
    cells = (f"`{metric.name}`", metric.kind, metric.unit, _labels(metric), metric.help, metric.moves)
    return f"| {' | '.join(cells)} |\n"


def _labels(metric: metrics.Metric) -> str:
    if metric is metrics.REQUESTS:
        return "`endpoint`, `status`: see below"
    if metric is metrics.BUILD_INFO:
        return "`version`"
    return " ".join(
        f"`{label}`: {', '.join(values[position] for values in metric.series)}" for position, label in enumerate(metric.labels)
    )


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
