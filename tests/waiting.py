"""Waiting for a condition instead of sleeping."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

_FIRST_PAUSE_S = 0.005
_LONGEST_PAUSE_S = 0.05


def wait_until(predicate: Callable[[], Any], within_s: float = 5.0, what: str = "") -> Any:
    """The first true value of the predicate, asked ever more slowly. Fails when none comes in time."""
    deadline = time.monotonic() + within_s
    pause_s = _FIRST_PAUSE_S
    while not (value := predicate()):
        assert time.monotonic() < deadline, f"not within {within_s:g} s: {what or predicate}"
        time.sleep(pause_s)
        pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
    return value
