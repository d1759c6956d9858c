"""What a server costs before it does anything: seconds from command to ready, idle share of a core, resident memory.

    python benchmarks/footprint.py --runs 5 --idle_s 60

Starts ``packhorse embeddings`` on the bundled model; prints a table. Uses the harness of the process tests.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path

import httpx
from rich.console import Console
from rich.table import Table

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tests"))

from stack import Stack  # the path above is what makes this importable
from waiting import wait_until


def seconds_to_ready(stack: Stack) -> float:
    began = time.monotonic()
    stack.start()
    wait_until(lambda: _answers(stack), 120)
    return time.monotonic() - began


def _answers(stack: Stack) -> bool:
    try:
        return stack.http.post("/v1/embeddings", json={"input": "x"}).status_code == 200
    except httpx.TransportError:
        return False


def idle_and_memory(stack: Stack, idle_s: float) -> list[tuple[str, float, float]]:
    """Name, share of a core and MiB resident of each process, over ``idle_s`` seconds without a request."""
    processes = stack.processes()
    before = [sum(process.cpu_times()[:2]) for process in processes]
    time.sleep(idle_s)
    return [
        (
            next((role for role in ("broker", "worker", "frontend") if role in process.cmdline()), "supervisord"),
            (sum(process.cpu_times()[:2]) - cpu_s) / idle_s,
            process.memory_info().rss / (1 << 20),
        )
        for process, cpu_s in zip(processes, before, strict=True)
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=5)
    parser.add_argument("--idle_s", type=float, default=60)
    options = parser.parse_args()
    starts: list[float] = []
    rows: list[tuple[str, float, float]] = []
    for run in range(options.runs):
        stack = Stack()
        try:
            starts.append(seconds_to_ready(stack))
            if run == options.runs - 1:
                rows = idle_and_memory(stack, options.idle_s)
            stack.stop()
        finally:
            stack.clean()
    table = Table(title=f"footprint, {options.runs} starts, {options.idle_s:g} s idle")
    for heading in ("process", "idle, share of a core", "resident MiB"):
        table.add_column(heading)
    for name, share, mib in rows:
        table.add_row(name, f"{share:.2%}", f"{mib:.0f}")
    console = Console()
    console.print(table)
    console.print(
        f"command to first answer: min {min(starts):.1f} s, median {statistics.median(starts):.1f} s, max {max(starts):.1f} s"
    )


if __name__ == "__main__":
    main()
