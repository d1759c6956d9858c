"""A storm: every fault at random on a server under load, for as long as one likes: ``make storm MINUTES=10``.

The real launcher, supervisord, broker and frontends; the workers are stand-ins. Ends with a table, and with status 1 if any
request was lost, hung, answered twice or with another's vectors, or if anything is left of it all when the wind has died down.
"""

from __future__ import annotations

import argparse
import random
import secrets
import sys
import tempfile
import threading
import time
from collections import Counter
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

from footprint import Footprint
from gusts import FRONTENDS, HANGS, KILLS, WORKERS, Gusts, Logbook
from harm import wait_ready_workers
from load import Load
from memory_watch import Memory, MemoryWatch
from questions import random_questions
from report import Report, Sent
from standin import Traps
from standin_stack import StandInStack

RATE = 120
LARGE_RATE = 4
REQUEST_TIMEOUT_S = 20.0
ALLOWED = {200, 429, 500, 503, 504}
_DEADLY_SHARE = 0.2
"""For this share of the time every process may be killed; then some are spared, so that their memory can be watched."""
_WARM_UP_S = 600.0
_SETTLES_WITHIN_S = 60.0


@dataclass
class Outcome:
    """What a storm left."""

    seed: int
    seconds: float = 0.0
    faults: Counter[str] = field(default_factory=Counter)
    answers: Counter[int | str] = field(default_factory=Counter)
    slowest_s: float = 0.0
    violations: list[str] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)


def blow(model: Path, seconds: float, seed: int, *, gusts_at_once: int = 2) -> Outcome:
    """Let a storm blow for some seconds over a server of its own."""
    outcome = Outcome(seed)
    began = time.monotonic()
    flags = (f"--workers_per_device={WORKERS}", f"--num_frontends={FRONTENDS}", "--batch_timeout=2", "--worker_timeout=4")
    traps = Traps(batch_s=0.01, kill=(KILLS,), hang=(HANGS,), logs_ids=False)
    stack = StandInStack(*flags, f"--request_timeout={REQUEST_TIMEOUT_S:g}", model=model, traps=traps)
    try:
        stack.start().wait_ready(WORKERS, frontends=FRONTENDS)
        _blow_over(stack, seconds, seed, gusts_at_once, outcome)
        if (status := stack.stop()) != 0:
            outcome.violations.append(f"the server ended with status {status}")
    except AssertionError as problem:
        outcome.violations.append(str(problem))
    finally:
        stack.clean()
    outcome.violations += [f"{each.name} ({each.pid}) grows" for each in outcome.memories if each.grows]
    outcome.seconds = time.monotonic() - began
    return outcome


def _blow_over(stack: StandInStack, seconds: float, seed: int, gusts_at_once: int, outcome: Outcome) -> None:
    source = random.Random(seed)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as loads:
        log = Logbook()
        gusts = [Gusts(stack, source.randrange(1 << 30), Path(folder), log) for _ in range(gusts_at_once)]
        before = Footprint(stack)
        memory = MemoryWatch(stack, min(_WARM_UP_S, seconds / 3))
        small = random_questions(seed, 512)
        large = random_questions(seed + 1, 32, inputs=48, fields={"priority": 1})
        running = [
            loads.enter_context(Load(stack.port, questions, rate=rate, seed=seed, patience_s=REQUEST_TIMEOUT_S + 5))
            for questions, rate in ((small, RATE), (large, LARGE_RATE))
        ]
        _run_gusts(gusts, log, running, seconds, outcome)
        wait_ready_workers(stack, WORKERS, _SETTLES_WITHIN_S)
        _judge(outcome, [load.stop() for load in running], log)
        _judge_faults(outcome, log)
        outcome.memories = memory.stop()
        if (Path(folder) / "unpickled").exists():
            outcome.violations.append("a message was unpickled")
        before.assert_back(_SETTLES_WITHIN_S)


def _run_gusts(gusts: list[Gusts], log: Logbook, running: list[Load], seconds: float, outcome: Outcome) -> None:
    """Blow, and look at what has been answered every second."""
    stopping = threading.Event()

    def blow_on(each: Gusts) -> None:
        while not stopping.wait(each.pause_s()):
            try:
                each.blow()
            except Exception as problem:
                outcome.violations.append(f"a fault could not be done: {problem!r}")

    threads = [threading.Thread(target=blow_on, args=(each,), name="gusts", daemon=True) for each in gusts]
    for thread in threads:
        thread.start()
    began = time.monotonic()
    while (passed := time.monotonic() - began) < seconds:
        log.spares_some = passed > _DEADLY_SHARE * seconds
        time.sleep(min(1.0, seconds - passed))
        _judge(outcome, [load.take() for load in running], log)
    stopping.set()
    for thread in threads:
        thread.join(REQUEST_TIMEOUT_S * 3)
        if thread.is_alive():
            outcome.violations.append("a fault did not end")


def _judge(outcome: Outcome, reports: list[Report], log: Logbook) -> None:
    def may_be_lost(sent: Sent) -> bool:
        return sent.problem != "ConnectionRefusedError" and any(each.touches(sent) for each in log.outages)

    for report in reports:
        outcome.answers.update(report.counts)
        outcome.slowest_s = max(outcome.slowest_s, report.slowest_s)
        outcome.violations += report.faults(REQUEST_TIMEOUT_S, may_be_lost=may_be_lost)
        outcome.violations += [
            f"request {each.number}: status {each.status}: {each.body[:200]!r}"
            for each in report.sent
            if each.status and (each.status not in ALLOWED or (each.status == 500 and each.code != "worker_died"))
        ]


def _judge_faults(outcome: Outcome, log: Logbook) -> None:
    """The faults that were requests themselves: those that cannot succeed must not."""
    outcome.faults = log.counts
    for name, report in log.reports:
        _judge(outcome, [report], log)
        if name != "overload" and report.counts[200]:
            outcome.violations.append(f"a request that kills or hangs its worker ({name}) was answered with 200")


def print_outcome(outcome: Outcome, console: Console) -> None:
    """The table at the end."""
    console.print(f"\nstorm of {outcome.seconds:.0f} s, seed {outcome.seed}; slowest answer {outcome.slowest_s:.2f} s")
    tables = {
        "faults": (("fault", "times"), [(name, str(count)) for name, count in sorted(outcome.faults.items())]),
        "answers": (("answer", "requests"), [(str(name), str(count)) for name, count in outcome.answers.most_common()]),
        "memory after warm-up": (
            ("process", "pid", "s", "MiB", "MiB/h", "+-"),
            [_memory_row(each) for each in outcome.memories],
        ),
    }
    for title, (columns, rows) in tables.items():
        table = Table(*columns, title=title, title_justify="left", box=None, pad_edge=False)
        for row in rows:
            table.add_row(*row)
        console.print(table)
    for violation in outcome.violations[:50]:
        console.print(f"VIOLATION {violation}", markup=False)
    console.print(f"{len(outcome.violations)} violations")


def _memory_row(memory: Memory) -> tuple[str, ...]:
    slope, error = memory.slope_per_hour()
    numbers = (memory.resident_bytes[-1] / 2**20, slope / 2**20, error / 2**20)
    return (memory.name, str(memory.pid), f"{memory.seconds:.0f}", *(f"{number:.1f}" for number in numbers))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=None)
    options = parser.parse_args()
    seed = secrets.randbelow(1 << 30) if options.seed is None else options.seed
    console = Console(highlight=False)
    console.print(f"seed {seed}, {options.minutes:g} minutes")
    from tiny_models import build_t

    with tempfile.TemporaryDirectory() as folder:
        outcome = blow(build_t(Path(folder) / "t"), 60 * options.minutes, seed)
    print_outcome(outcome, console)
    return 1 if outcome.violations else 0


if __name__ == "__main__":
    sys.exit(main())
