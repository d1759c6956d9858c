"""A short storm: every fault at random. ``make storm`` lets one blow for longer."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

import storm

pytestmark = [pytest.mark.process, pytest.mark.timeout(240)]

SEED = 73


def test_a_short_storm(t_model: Path) -> None:
    outcome = storm.blow(t_model, seconds=20, seed=SEED)
    storm.print_outcome(outcome, Console(highlight=False))
    assert not outcome.violations
    assert outcome.answers[200] > 20 * storm.RATE / 6
    assert outcome.faults.total() >= 8
