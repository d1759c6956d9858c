"""The two timings of ``gpu_measure.py``, in alternating rounds: calls of many texts, and one text at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import gpu_systems as systems
import numpy as np
from gpu_models import ids_of, text_maker
from gpu_report import figure
from gpu_run import Case, Run, cases_of, lengths_of, tell

_SAMPLE_S = 0.12
"""A sample of throughput is as many calls as take about this long."""
_MOST_CALLS = 200
_BLOCK_S = 0.3
_BLOCK_CALLS = 40
"""A block of latencies ends with the first of both."""
_VARIANTS = 4
"""Calls with different texts, made before anything is timed."""
_T = TypeVar("_T")


@dataclass
class LatencyLine:
    """One system on single texts of one length."""

    tokens: int
    source: str
    system: str
    inputs: list[Any]
    blocks: list[list[float]] = field(default_factory=list)
    """Milliseconds."""


def latency(run: Run) -> None:
    """One text at a time, in alternating blocks of calls."""
    texts_of = text_maker(run.model.folder)
    lines = []
    for tokens in lengths_of(quick=run.plan.quick):
        texts = texts_of(tokens, 16, 4)
        inputs: dict[str, list[Any]] = {"texts": list(texts), "ids": list(ids_of(run.model.folder, texts))}
        for source, given in inputs.items():
            for name in run.systems_for(source):
                line = LatencyLine(tokens, source, name, given)
                with run.noting(f"first calls of {name}, 1 text of {tokens} tokens from {source}"):
                    block(run, line, calls=3)
                    lines.append(line)
    for number in run.rounds():
        for line in from_place(lines, number):
            with run.noting(f"latency of {line.system}, {line.tokens} tokens from {line.source}"):
                line.blocks.append(block(run, line, calls=3 if run.plan.quick else _BLOCK_CALLS))
        run.found["latency"] = [
            {"tokens": line.tokens, "source": line.source, "system": line.system, **latency_figures(line.blocks)}
            for line in lines
            if line.blocks
        ]
        run.write()


def block(run: Run, line: LatencyLine, calls: int) -> list[float]:
    """Milliseconds of single calls."""
    found = []
    ends_at = time.perf_counter() + _BLOCK_S
    for number in range(calls):
        one = [line.inputs[number % len(line.inputs)]]
        began = time.perf_counter()
        run.encode(line.system, one, line.source, 1)
        ended = time.perf_counter()
        found.append(1000 * (ended - began))
        if ended > ends_at:
            break
    return found


def latency_figures(blocks: Sequence[list[float]]) -> dict[str, Any]:
    """The median and the 99th percentile over all calls, and how the blocks' medians spread."""
    p50, p99 = np.percentile([each for one in blocks for each in one], (50, 99)).tolist()
    medians = figure([statistics.median(each) for each in blocks])
    return {"calls": sum(map(len, blocks)), "p50_ms": p50, "p99_ms": p99, "block_p50_ms": medians}


def from_place(items: Sequence[_T], number: int) -> list[_T]:
    """All of them in turn, each round beginning with another one."""
    place = number % len(items) if items else 0
    return [*items[place:], *items[:place]]


@dataclass
class ThroughputLine:
    """One system on one case."""

    case: Case
    system: str
    batch: int
    inputs: list[list[Any]]
    calls: int = 1
    """That make a sample."""
    texts_per_s: list[float] = field(default_factory=list)


def throughput(run: Run) -> None:
    """Everything in turn, round by round."""
    texts_of = text_maker(run.model.folder)
    lines = []
    for case in cases_of(quick=run.plan.quick):
        inputs: list[list[Any]] = [list(texts_of(case.tokens, case.texts, 100 + each)) for each in range(_VARIANTS)]
        if case.source == "ids":
            inputs = [list(ids_of(run.model.folder, each)) for each in inputs]
        for name in run.systems_for(case.source):
            with run.noting(f"first calls of {name}, {case.name}"):
                lines.append(prepared(run, case, name, inputs))
    tell(f"{run.plan.model}: throughput, all prepared")
    for number in run.rounds():
        for line in from_place(lines, number):
            with run.noting(f"{line.system}, {line.case.name}"):
                line.texts_per_s.append(line.case.texts * line.calls / seconds_of(run, line))
        run.found["throughput"] = [told(run, line) for line in lines if line.texts_per_s]
        run.write()


def prepared(run: Run, case: Case, name: str, inputs: list[list[Any]]) -> ThroughputLine:
    """Warm up, choose a library's batch size, and find out how many calls make a sample."""
    is_ours = name in (systems.EAGER, systems.GRAPHS)
    seconds: dict[int, float] = {}
    for batch in [case.batch] if is_ours else case.batches():
        tried = ThroughputLine(case, name, batch, inputs)
        seconds_of(run, tried)
        seconds[batch] = min(seconds_of(run, tried) for _ in range(1 if run.plan.quick else 3))
    batch = min(seconds, key=seconds.__getitem__)
    calls = 1 if run.plan.quick else max(1, min(_MOST_CALLS, round(_SAMPLE_S / seconds[batch])))
    return ThroughputLine(case, name, batch, inputs, calls)


def seconds_of(run: Run, line: ThroughputLine) -> float:
    """Of one sample."""
    began = time.perf_counter()
    for call in range(line.calls):
        run.encode(line.system, line.inputs[call % len(line.inputs)], line.case.source, line.batch)
    return time.perf_counter() - began


def told(run: Run, line: ThroughputLine) -> dict[str, Any]:
    """As the report has it."""
    case, rates = line.case, line.texts_per_s
    peak = run.found.get("peak_flops")
    flops_per_text = case.tokens * run.model.flops_per_token(case.tokens)
    return {
        "tokens": case.tokens,
        "texts": case.texts,
        "source": case.source,
        "system": line.system,
        "batch": line.batch,
        "calls": line.calls,
        "texts_per_s": figure(rates),
        "tokens_per_s": figure([rate * case.tokens for rate in rates]),
        "share_of_peak": None if not peak else statistics.median(rates) * flops_per_text / peak["median"],
    }
