"""The report of a run: what ``--json`` writes and the tables show, and what the reader must be warned of."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import msgspec

from packhorse.bench.comparison import Ratio, compare
from packhorse.bench.options import Options
from packhorse.bench.samples import Samples
from packhorse.bench.summary import ServerReport, report_of
from packhorse.bench.target import Target
from packhorse.bench.texts import SETS
from packhorse_shared import __version__
from packhorse_shared.logs import escape

NAMES = ("A", "B")
_BUSY_SHARE = 0.9
_LATE_MS = 1.0
_LAG_MS = 5.0
_FEW_ANSWERS = 100


class RunReport(msgspec.Struct, frozen=True):
    """Everything about one run."""

    version: str
    """Of Packhorse's command, not of the servers."""
    load: str
    """In words."""
    options: dict[str, Any]
    """As given and defaulted, without the key."""
    servers: list[ServerReport]
    ratios: list[Ratio]
    """Of two servers: the first as a multiple of the second."""
    notes: list[str]


def report_of_run(
    options: Options, measured: Sequence[tuple[Target, list[Samples]]], inputs: int | None, is_cut: bool
) -> RunReport:
    """``inputs`` in each request, None when that differs; ``is_cut``: the user's file was longer than what is used of it."""
    servers = [report_of(target, slices, options.rate is not None) for target, slices in measured]
    ratios = compare(servers[0].rounds, servers[1].rounds) if len(servers) == 2 else []
    told = {name: value for name, value in msgspec.structs.asdict(options).items() if name not in ("api_key", "json", "plot")}
    notes = [f"of {options.texts} only the first 64 MiB were used"] if is_cut else []
    if any(each.is_interrupted for _, slices in measured for each in slices):
        notes.append(f"interrupted; the load lasted {sum(each.total.seconds for each in servers):.1f} s")
    for name, server in zip(NAMES, servers, strict=False):
        notes += [f"{name}: {note}" if len(options.urls) == 2 else note for note in _notes(server, options)]
    return RunReport(__version__, describe(options, inputs), told, servers, ratios, notes)


def describe(options: Options, inputs: int | None) -> str:
    """The load in words."""
    known = SETS.get(options.texts)
    what = f"{options.texts} texts ({known.description})" if known else escape(options.texts)
    count = "whole requests" if inputs is None else f"{_many(inputs, 'input')} a request"
    loop = f"closed loop of {options.concurrency}" if options.rate is None else f"open loop at {options.rate:g} requests/s"
    until = f"{options.duration:g} s" if options.duration is not None else f"{options.requests} requests"
    rounds = f" each in {options.rounds} alternating rounds" if len(options.urls) == 2 else ""
    formats = f", {options.encoding_format}" if options.endpoint == "embeddings" else ""
    return f"{options.endpoint}{formats}, {what}, {count}; {loop}, {until}{rounds}"


def verdict(report: RunReport) -> str | None:
    """Why the run counts as failed, in one line; None when it does not."""
    for server in report.servers:
        broken = [each for each in server.failures if each.is_transport]
        total = server.total
        if broken:
            kinds = ", ".join(f"{each.kind} ({each.count:,})" for each in broken)
            return f"{server.url} did not answer rightly: {kinds}; for example {broken[0].example}"
        if not total.answered:
            reason = server.failures[0].example if server.failures else server.refusal
            return f"{server.url} answered none of {_many(total.failed + total.refused, 'request')}" + (
                f": {reason}" if reason else ""
            )
    return None


def _notes(server: ServerReport, options: Options) -> Iterator[str]:
    """What a reader must know before believing the figures."""
    client, total = server.client, server.total
    if client.cpu_share > _BUSY_SHARE:
        yield f"the client itself was the limit: it used {client.cpu_share:.0%} of its core"
    elif client.loop_lag_p99_ms > _LAG_MS:
        lag = f"{client.loop_lag_p99_ms:.1f} ms"
        yield f"the client itself was late by {lag} (p99): its machine is busy, latencies look too high"
    if client.late_p99_ms is not None and (client.late_p99_ms > _LATE_MS or client.waited_for_connection):
        late = f"requests were sent late (p99 {client.late_p99_ms:.1f} ms, at most {client.late_max_ms:.1f} ms)"
        waited = f"{client.waited_for_connection:,} of them because all {options.connections} connections were in use"
        why = waited if client.waited_for_connection else "because the client was busy"
        yield f"{late}, {why}; that is part of their latency"
    if client.never_sent:
        unsent = _many(client.never_sent, "request")
        yield f"not sent although due: {unsent}; the server falls behind, so that real latencies are higher"
    if total.abandoned:
        yield f"{_many(total.abandoned, 'open request')} left without an answer"
    if 0 < total.answered < _FEW_ANSWERS:
        yield f"only {_many(total.answered, 'answer')}: p95 and p99 say little"


def _many(count: int, thing: str) -> str:
    return f"{count:,} {thing}{'' if count == 1 else 's'}"
