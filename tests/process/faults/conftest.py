"""What the tests of faults get: servers with stand-ins for workers, and a watch over what a fault leaves behind."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from footprint import Footprint, Settled
from stack import Stack
from standin import Traps
from standin_stack import StandInFactory, StandInStack


@pytest.fixture
def make_standin(t_model: Path) -> Iterator[StandInFactory]:
    """Makes servers of stand-ins that are ended and removed after the test. For one that a module shares: ``standins``."""
    with standins(t_model) as make:
        yield make


@contextlib.contextmanager
def standins(model: Path) -> Iterator[StandInFactory]:
    """``make(*flags, folder=..., environment=..., **traps)`` until the end of the block. ``folder``: another model's."""
    made: list[StandInStack] = []

    def make(*flags: str, folder: Path | None = None, environment: dict[str, str] | None = None, **traps: Any) -> StandInStack:
        made.append(StandInStack(*flags, model=folder or model, traps=Traps(**traps), environment=environment))
        return made[-1]

    try:
        yield make
    finally:
        for each in made:
            each.clean()


@pytest.fixture(scope="module")
def make_shared_standin(t_model: Path) -> Iterator[StandInFactory]:
    """The same for fixtures of a whole module, whose faults leave the server whole."""
    with standins(t_model) as make:
        yield make


@pytest.fixture
def settled() -> Settled:
    """``with settled(stack):`` around load and fault: afterwards the server is back where it was."""

    @contextlib.contextmanager
    def watch(stack: Stack) -> Iterator[Footprint]:
        before = Footprint(stack)
        yield before
        before.assert_back()

    return watch
