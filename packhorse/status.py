"""``packhorse status``: what a running server does right now."""

from __future__ import annotations

import sys
from collections.abc import Mapping

import msgspec
from rich.console import Console
from rich.table import Table

from packhorse.locate import locate, tool_parser
from packhorse_shared.logs import escape
from packhorse_shared.messages import StatusReport, WorkerStatus
from packhorse_shared.sockets import query_status

_TIMEOUT_S = 3.0
_PIPE_WIDTH = 160
"""Columns when the output is no terminal: wide enough that nothing is cut."""


def status(argv: list[str], environ: Mapping[str, str]) -> int:
    """Run the command. Raises PackhorseError with one line when no server is found or it does not answer."""
    parser = tool_parser("status", "Queue, workers and rates of a running server.")
    parser.add_argument("--json", action="store_true", help="the body of GET /status")
    parsed, run_dir = locate(parser, argv, environ)
    report = query_status(run_dir, _TIMEOUT_S)
    if parsed.json:
        print(msgspec.json.format(msgspec.json.encode(report)).decode())
        return 0
    console = Console(width=None if sys.stdout.isatty() else _PIPE_WIDTH, highlight=False, markup=False, emoji=False)
    for line in summary(report):
        console.print(escape(line))
    console.print(worker_table(report.workers))
    return 0


def summary(report: StatusReport) -> list[str]:
    """The lines above the table."""
    model, queue, rates = report.model, report.queue, report.rates
    per_token = " a token" if model is not None and model.task == "token_reward" else ""
    name = "no worker is ready yet" if model is None else f"{model.name}, {model.task}, {model.dimension} values{per_token}"
    details = "" if model is None else f", {model.dtype}, up to {model.max_seq_len} tokens"
    oldest = f", the oldest for {queue.oldest_wait_ms:.1f} ms" if queue.inputs else ""
    return [
        f"Packhorse {report.version}: {name}{details}",
        f"waiting  {queue.inputs} of {queue.limit} inputs in {queue.requests} requests{oldest}",
        f"rates    {rates.requests_per_s:.1f} requests/s, {rates.inputs_per_s:.1f} inputs/s, {rates.tokens_per_s:.1f} tokens/s",
    ]


def worker_table(workers: list[WorkerStatus]) -> Table:
    """One row per worker."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("worker", "pid", "device", "state"):
        table.add_column(column)
    for column in ("in flight", "batches", "inputs", "tokens", "busy %", "memory MiB"):
        table.add_column(column, justify="right")
    for worker in workers:
        counts = (worker.in_flight, worker.batches, worker.inputs, worker.tokens)
        shares = (f"{100 * worker.busy:.0f}", f"{worker.memory_bytes / (1 << 20):.0f}")
        names = (worker.id, worker.pid, worker.device, worker.state)
        table.add_row(*(escape(str(cell)) for cell in (*names, *counts, *shares)))
    return table
