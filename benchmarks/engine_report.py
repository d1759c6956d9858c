"""The table and the plot of ``engine.py``."""

from __future__ import annotations

import importlib.metadata
import platform
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from rich.console import Console
from rich.table import Table

COLOURS = {"float32": "#4c78a8", "bfloat16": "#d98324"}
INK = "#111827"
GREY = "#6b7280"


@dataclass(frozen=True)
class Line:
    """One system on one case with one number of threads."""

    threads: int
    case: str
    system: str
    texts_per_s: float
    ms_per_call: float
    ratio: float
    goal: float | None
    share_of_peak: float
    ratio_at_peak: float
    """What the ratio would be if linear layers at their peak were all that takes time."""

    @property
    def dtype(self) -> str:
        """Its number format, which its name ends with."""
        return self.system.rpartition(" ")[2]


def facts_of_machine() -> dict[str, str]:
    """The processor and the versions that figures depend on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    facts = dict(line.split(":", 1) for line in lines if line.count(":") == 1)
    processor = {key.strip(): value.strip() for key, value in facts.items()}
    name = processor.get("model name", platform.processor() or platform.machine())
    family = "".join(f", {key} {processor[key]}" for key in ("cpu family", "model") if key in processor)
    versions = {each: importlib.metadata.version(each) for each in ("torch", "transformers", "sentence-transformers")}
    return {"processor": f"{name}{family}", **versions}


def lines_of(report: Mapping[str, Any]) -> Iterator[Line]:
    """Medians, as texts per second and as ratios to the reference."""
    for result in report["results"]:
        for name, case in result["cases"].items():
            medians = {system: statistics.median(samples) for system, samples in case["seconds"].items()}
            tokens = statistics.median(case["tokens"])
            calls = case["texts"] / case["texts_per_call"]
            reference = result["reference"]
            for system, seconds in medians.items():
                dtype = system.rpartition(" ")[2]
                flops = tokens * result["flops_per_token"] / seconds
                yield Line(
                    threads=result["threads"],
                    case=name,
                    system=system,
                    texts_per_s=case["texts"] / seconds,
                    ms_per_call=1000 * seconds / calls,
                    ratio=medians[reference] / seconds,
                    goal=None if system == reference else case["goals"][dtype],
                    share_of_peak=flops / result["peak_flops"][dtype],
                    ratio_at_peak=medians[reference] * result["peak_flops"][dtype] / (tokens * result["flops_per_token"]),
                )


def print_table(report: Mapping[str, Any]) -> None:
    """Medians of everything; below, what else is needed to read them."""
    table = Table(title=f"medians of {report['repetitions']} alternating repetitions")
    for heading in ("threads", "texts", "system"):
        table.add_column(heading, no_wrap=True)
    for heading in ("texts/s", "ms a call", "ratio", "meant to reach", "share of GEMM peak", "ratio at peak"):
        table.add_column(heading, justify="right")
    before = None
    for line in lines_of(report):
        group = (line.threads, line.case)
        if before is not None and group != before:
            table.add_section()
        first = ("", "") if group == before else (str(line.threads), line.case)
        goal = "" if line.goal is None else f"{line.goal:.1f}" + ("" if line.ratio >= line.goal else " (missed)")
        figures = (f"{line.texts_per_s:.0f}", f"{line.ms_per_call:.1f}", f"{line.ratio:.2f}", goal, f"{line.share_of_peak:.0%}")
        figures += (f"{line.ratio_at_peak:.1f}",)
        table.add_row(*first, line.system, *figures)
        before = group
    console = Console(width=150)
    console.print(table)
    console.print(", ".join(f"{key} {value}" for key, value in report["machine"].items()))
    for result in report["results"]:
        peaks = ", ".join(f"{dtype} {flops / 1e9:.0f} GFLOP/s" for dtype, flops in result["peak_flops"].items())
        sizes = ", ".join(str(case["batch_size"]) for case in result["cases"].values())
        console.print(f"{result['threads']} threads: GEMM peak {peaks}; best batch sizes of sentence-transformers: {sizes}")
    differences = [case["difference"] for result in report["results"] for case in result["cases"].values()]
    for system in differences[0]:
        found = [each[system] for each in differences]
        reference = report["results"][0]["reference"]
        worst = max(each["max_abs"] for each in found)
        cosine = min(each["min_cosine"] for each in found)
        console.print(f"{system} against {reference}: largest difference {worst:.1e}, smallest cosine {cosine:.5f}")


def plot(report: Mapping[str, Any], path: Path) -> None:
    """Bars of the ratios, a panel for each number of threads; a line across a bar is what it is meant to reach."""
    mpl.use("Agg")
    reference = report["results"][0]["reference"]
    lines = [line for line in lines_of(report) if line.system != reference]
    threads = [result["threads"] for result in report["results"]]
    figure, panels = plt.subplots(1, len(threads), figsize=(1.2 + 5.4 * len(threads), 4.6), sharey=True, squeeze=False)
    for panel, count in zip(panels[0], threads, strict=True):
        _draw(panel, [line for line in lines if line.threads == count])
        panel.set_title(f"{count} thread{'s' if count > 1 else ''}", fontsize=11, loc="left", color=INK)
    panels[0][0].set_ylabel(f"texts per second, as a multiple of\n{reference}", fontsize=9, color=GREY)
    panels[0][0].set_ylim(0, 1.06 * max(max(line.ratio, line.goal or 0) for line in lines))
    handles, labels = panels[0][0].get_legend_handles_labels()
    handles += [
        Line2D([], [], color=INK, linewidth=1.6),
        Line2D([], [], color=GREY, linewidth=1, linestyle=(0, (4, 3))),
    ]
    labels += ["meant to reach", reference]
    columns = len(labels) if len(threads) > 1 else 2
    figure.legend(handles, labels, loc="lower center", ncols=columns, frameon=False, fontsize=9, labelcolor=GREY)
    figure.suptitle("all-MiniLM-L6-v2 on a CPU, from texts to vectors", x=0.01, ha="left", fontsize=12, color=INK)
    figure.tight_layout(rect=(0, 0.07 if columns > 2 else 0.11, 1, 0.98))
    figure.savefig(path, dpi=150, facecolor="white")
    plt.close(figure)


def _draw(panel: Axes, lines: Sequence[Line]) -> None:
    systems = list(dict.fromkeys(line.system for line in lines))
    cases = list(dict.fromkeys(line.case for line in lines))
    width = 0.8 / len(systems)
    for line in lines:
        place, number = cases.index(line.case), systems.index(line.system)
        x = place + (number - (len(systems) - 1) / 2) * width
        panel.bar(x, line.ratio, width * 0.94, color=COLOURS[line.dtype], label=line.system if place == 0 else None)
        # At the foot, where no line crosses it.
        panel.text(x, 0.12, f"{line.ratio:.1f}", ha="center", va="bottom", fontsize=10, weight="bold", color="white")
        if line.goal is not None:
            panel.hlines(line.goal, x - width * 0.47, x + width * 0.47, color=INK, linewidth=1.6)
    panel.axhline(1, color=GREY, linewidth=1, linestyle=(0, (4, 3)))
    panel.set_xticks(range(len(cases)), [case.replace(", ", ",\n") for case in cases], fontsize=9)
    panel.tick_params(axis="both", length=0, colors=GREY)
    panel.grid(axis="y", color="#e5e7eb", linewidth=0.8)
    panel.set_axisbelow(True)
    for side in ("top", "right", "left"):
        panel.spines[side].set_visible(False)
    panel.spines["bottom"].set_color("#d1d5db")
