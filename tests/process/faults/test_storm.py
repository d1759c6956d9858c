"""A short storm: every fault at random. ``make storm`` lets one blow for longer."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from rich.console import Console

import storm
from memory_watch import Memory

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

SEED = 73


def test_a_short_storm(t_model: Path) -> None:
    outcome = storm.blow(t_model, seconds=20, seed=SEED)
    storm.print_outcome(outcome, Console(highlight=False))
    assert not outcome.violations
    assert outcome.answers[200] > 20 * storm.RATE / 6
    assert outcome.faults.total() >= 8


@pytest.mark.parametrize(
    ("mib_per_hour", "step_mib", "seconds", "grows"),
    [(0.0, 0.0, 900, False), (0.5, 0.0, 900, False), (0.0, 3.0, 900, False), (10.0, 0.0, 900, True), (10.0, 0.0, 300, False)],
)
def test_a_leak_is_told_from_a_step(mib_per_hour: float, step_mib: float, seconds: int, grows: bool) -> None:
    noise = Random(SEED)
    memory = Memory("frontend 0", 1)
    for second in range(seconds + 1):
        mib = 70 + mib_per_hour * second / 3600 + (step_mib if second > 200 else 0) + noise.gauss(0, 0.1)
        memory.times.append(1000.0 + second)
        memory.resident_bytes.append(int(mib * 2**20))
    assert memory.grows is grows
