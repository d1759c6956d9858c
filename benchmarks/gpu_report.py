"""What ``gpu.py`` shows: tables for the terminal and for Markdown, of the same rows, and what was reached."""

from __future__ import annotations

import importlib.metadata
import os
import platform
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pynvml
from rich.console import Console
from rich.table import Table

SCHEMA = 1
"""Of the JSON file; counted up when a key changes its meaning."""
LATENCY_GOAL = 0.5
"""Of the eager latency: what one text takes with graphs, at most."""
COSINE_GOAL = 0.99
"""To sentence-transformers (to another one where that could not be loaded), both in bfloat16."""
_PACKAGES = (
    "torch",
    "transformers",
    "sentence-transformers",
    "tokenizers",
    "numpy",
    "triton",
    "nvidia-cudnn-cu13",
    "flash-attn",
)


def figure(values: Sequence[float]) -> dict[str, Any]:
    """A measured number: its median and spread over so many runs, and every one of them."""
    return {
        "median": statistics.median(values),
        "low": min(values),
        "high": max(values),
        "runs": len(values),
        "values": [float(f"{each:.6g}") for each in values],
    }


def machine(device: str) -> dict[str, Any]:
    """The processor, the card, and the versions that figures depend on."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return {
        "processor": names[0] if names else platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "cards": [] if device == "cpu" else _cards(),
        "python": platform.python_version(),
        "versions": dict(_versions()),
    }


def _versions() -> Iterator[tuple[str, str]]:
    for name in _PACKAGES:
        try:
            yield name, importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue


def _cards() -> list[dict[str, Any]]:
    """As NVML tells, without a CUDA context."""
    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as problem:
        return [{"error": str(problem)}]
    driver = str(pynvml.nvmlSystemGetDriverVersion())
    found = []
    for index in range(pynvml.nvmlDeviceGetCount()):
        card = pynvml.nvmlDeviceGetHandleByIndex(index)
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(card).total)
        found.append({"name": str(pynvml.nvmlDeviceGetName(card)), "memory_bytes": memory, "driver": driver})
    return found


@dataclass(frozen=True)
class Rows:
    """A table."""

    title: str
    headings: tuple[str, ...]
    rows: list[tuple[str, ...]]


def tables(report: dict[str, Any]) -> list[Rows]:
    """Those that the report has anything for."""
    every = [_start(report), _throughput(report), _latency(report), _served(report)]
    return [each for each in every if each.rows]


def _start(report: dict[str, Any]) -> Rows:
    rows = []
    for model in report["models"].values():
        peak = model.get("peak_flops")
        for system, start in model.get("start", {}).items():
            taken = start["device_bytes"]
            cosine = model.get("min_cosine", {}).get(system)
            rows.append(
                (
                    model["title"],
                    "" if peak is None else f"{peak['median'] / 1e12:.3g}",
                    system,
                    f"{start['seconds']['median']:.1f}",
                    "" if taken is None else f"{taken / (1 << 20):,.0f}",
                    "" if cosine is None else f"{cosine:.5f}",
                )
            )
    headings = ("model", "matrix peak, TFLOP/s", "system", "load, s", "device memory, MiB", "smallest cosine")
    return Rows("loading, one run each", headings, rows)


def _throughput(report: dict[str, Any]) -> Rows:
    rows = []
    for model in report["models"].values():
        lines = model.get("throughput", [])
        for line in lines:
            same = [each for each in lines if _case(each) == _case(line)]
            base = next((each for each in same if each["system"] == "transformers"), None)
            rate, share = line["texts_per_s"], line["share_of_peak"]
            rows.append(
                (
                    model["title"],
                    f"{line['texts']} x {line['tokens']} tokens, from {line['source']}",
                    f"{line['system']} (batches of {line['batch']})",
                    f"{rate['median']:,.0f}",
                    f"{rate['low']:,.0f} to {rate['high']:,.0f} ({rate['runs']})",
                    f"{line['tokens_per_s']['median']:,.0f}",
                    "" if base is None else f"{rate['median'] / base['texts_per_s']['median']:.2f}",
                    "" if share is None else f"{share:.1%}",
                )
            )
    headings = ("model", "a call", "system", "texts/s", "spread (runs)", "tokens/s", "x transformers", "share of peak")
    return Rows("throughput, medians of alternating rounds", headings, rows)


def _case(line: dict[str, Any]) -> tuple[Any, ...]:
    return line["tokens"], line.get("texts"), line["source"]


def _latency(report: dict[str, Any]) -> Rows:
    rows = []
    for model in report["models"].values():
        lines = model.get("latency", [])
        for line in lines:
            same = {each["system"]: each for each in lines if _case(each) == _case(line)}
            eager = same.get("packhorse eager")
            rows.append(
                (
                    model["title"],
                    f"1 x {line['tokens']} tokens, from {line['source']}",
                    line["system"],
                    f"{line['p50_ms']:.3g}",
                    f"{line['p99_ms']:.3g}",
                    f"{line['calls']}",
                    "" if eager is None else f"{line['p50_ms'] / eager['p50_ms']:.2f}",
                )
            )
    headings = ("model", "a call", "system", "p50, ms", "p99, ms", "calls", "x eager")
    return Rows("latency of one text, alternating blocks", headings, rows)


def _served(report: dict[str, Any]) -> Rows:
    rows = []
    served = report.get("served") or {}
    lines = served.get("loads", [])
    alone = {_load(each): each for each in lines if (each["frontends"], each["workers"], each["graphs"]) == (1, 1, True)}
    for line in lines:
        rate, busy, one = line["texts_per_s"], line.get("gpu_busy_share"), alone.get(_load(line))
        rows.append(
            (
                served["model"],
                f"{line['clients']} clients, {line['inputs']} x {line['tokens']} tokens",
                f"{line['frontends']} / {line['workers']}" + ("" if line["graphs"] else " (eager)"),
                f"{rate['median']:,.0f}",
                f"{rate['low']:,.0f} to {rate['high']:,.0f} ({rate['runs']})",
                "" if one is None else f"{rate['median'] / one['texts_per_s']['median']:.2f}",
                f"{line['p50_ms']['median']:.3g}",
                f"{line['p99_ms']['median']:.3g}",
                f"{line['client_cpu_share']['median']:.0%}",
                "" if busy is None else f"{busy['median']:.0%}",
            )
        )
    rates = ("texts/s", "spread (slices)", "x 1 / 1", "p50, ms", "p99, ms")
    headings = ("model", "load", "frontends / workers", *rates, "client", "card busy")
    return Rows("through HTTP, one card", headings, rows)


def _load(line: dict[str, Any]) -> tuple[int, ...]:
    return line["clients"], line["inputs"], line["tokens"]


def verdicts(report: dict[str, Any]) -> list[dict[str, Any]]:
    """What was meant to be reached, and whether it was."""
    found = []
    for name, model in report["models"].items():
        medians = {(each["tokens"], each["source"], each["system"]): each["p50_ms"] for each in model.get("latency", [])}
        for tokens, source in ((50, "ids"), (50, "texts"), (512, "ids")):
            eager, graphs = (medians.get((tokens, source, f"packhorse {way}")) for way in ("eager", "graphs"))
            if eager and graphs:
                what = f"{name}: one text of {tokens} tokens from {source}, graphs at most {LATENCY_GOAL:g} of eager"
                found.append({"goal": what, "value": graphs / eager, "reached": graphs <= LATENCY_GOAL * eager})
        for system, cosine in model.get("min_cosine", {}).items():
            if system == model["cosine_to"]:
                continue
            what = f"{name}: cosine of {system} to {model['cosine_to']} at least {COSINE_GOAL:g}"
            found.append({"goal": what, "value": cosine, "reached": cosine >= COSINE_GOAL})
    return found


def show(report: dict[str, Any], console: Console) -> None:
    """Everything on the terminal."""
    for each in tables(report):
        table = Table(title=each.title)
        for number, heading in enumerate(each.headings):
            table.add_column(heading, justify="left" if number < 3 else "right")
        before = ("", "")
        for row in each.rows:
            if before != ("", "") and row[:2] != before:
                table.add_section()
            model = "" if row[0] == before[0] else row[0]
            table.add_row(model, "" if row[:2] == before else row[1], *row[2:])
            before = row[:2]
        console.print(table)
    console.print(_about(report))
    for verdict in report["verdicts"]:
        console.print(f"{'reached' if verdict['reached'] else 'MISSED'}: {verdict['goal']} ({verdict['value']:.4g})")
    for problem in report["problems"]:
        console.print(f"FAILED: {problem['part']}: {problem['error']}", markup=False)


def markdown(report: dict[str, Any]) -> str:
    """The same as a page."""
    parts = [_about(report)]
    for each in tables(report):
        lines = [f"**{each.title[0].upper()}{each.title[1:]}**", "", "| " + " | ".join(each.headings) + " |"]
        lines += ["|" + "---|" * len(each.headings), *("| " + " | ".join(row) + " |" for row in each.rows)]
        parts.append("\n".join(lines))
    said = [
        f"- {'reached' if each['reached'] else 'missed'}: {each['goal']} ({each['value']:.4g})" for each in report["verdicts"]
    ]
    said += [f"- failed: {each['part']}: {each['error'].splitlines()[0]}" for each in report["problems"]]
    return "\n\n".join([*parts, "\n".join(said)]) + "\n"


def _about(report: dict[str, Any]) -> str:
    facts = report["machine"]
    cards = ", ".join(each.get("name", each.get("error", "")) for each in facts["cards"]) or "no GPU"
    versions = ", ".join(f"{name} {version}" for name, version in facts["versions"].items())
    what = "tiny models, nothing to compare with; " if report["options"]["quick"] else ""
    return f"{what}{cards}; {facts['cores']} cores of {facts['processor']}; {versions}; {report['made_at']}"
