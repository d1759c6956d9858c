"""Servers for the tests of faults that users of such servers meet: one real tiny model for all files, stand-ins by the file."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from stack import Stack
from standin import Traps
from standin_stack import StandInFactory, StandInStack

BATCH = 4
"""Inputs in a forward of ``stack``: most requests of more are split."""


@pytest.fixture(scope="session")
def plain_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """T without prompts, whose "t99" is all NaN. Only for reading."""
    from tiny_models import build_n, write_json

    folder = build_n(tmp_path_factory.mktemp("models") / "plain")
    declared = folder / "config_sentence_transformers.json"
    write_json(declared, json.loads(declared.read_text(encoding="utf-8")) | {"prompts": {}})
    return folder


@pytest.fixture(scope="session")
def stack(plain_model: Path) -> Iterator[Stack]:
    """A server of that model, shared by the tests that leave it as they found it."""
    running = Stack(f"--max_batch_size={BATCH}", model=plain_model)
    try:
        yield running.start().wait_ready()
    finally:
        running.clean()


@pytest.fixture(scope="module")
def make_standin(t_model: Path) -> Iterator[StandInFactory]:
    """Makes servers of stand-ins that are ended and removed after the module."""
    made: list[StandInStack] = []

    def make(*flags: str, environment: dict[str, str] | None = None, **traps: Any) -> StandInStack:
        made.append(StandInStack(*flags, model=t_model, traps=Traps(**traps), environment=environment))
        return made[-1]

    yield make
    for each in made:
        each.clean()
