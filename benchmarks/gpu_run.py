"""One model's measurement under way: what is asked for, what was found, what failed."""

from __future__ import annotations

import contextlib
import json
import sys
import time
import traceback
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
from gpu_models import BuiltModel
from gpu_systems import System

LENGTHS = (50, 512)
"""Tokens of the texts: those of the published comparisons."""
QUICK_LENGTHS = (10, 40)


def lengths_of(*, quick: bool) -> tuple[int, int]:
    """Tokens of short and of long texts."""
    return QUICK_LENGTHS if quick else LENGTHS


class Plan(msgspec.Struct, frozen=True):
    """What is asked for."""

    model: str
    into: str
    """Folder of models that have to be made."""
    result: str
    """File."""
    device: str
    quick: bool
    until_s: float
    """Seconds from the start of the process after which no new round begins."""
    rounds: int
    only: list[str]


@dataclass(frozen=True)
class Case:
    """One size of call."""

    tokens: int
    texts: int
    """In a call."""
    batch: int
    """Texts in a forward of Packhorse; the libraries get the size, of some, that turns out best for them."""
    source: str
    """``texts`` or ``ids``."""

    def batches(self) -> list[int]:
        """Sizes that a library tries."""
        return sorted({min(self.texts, size) for size in (self.batch // 4, self.batch, self.batch * 4) if size})

    @property
    def name(self) -> str:
        return f"{self.texts} texts of {self.tokens} tokens from {self.source}"


def cases_of(*, quick: bool) -> list[Case]:
    """A batch as a server gets it, and many texts at once, of both lengths, from texts and from ids."""
    short, long = lengths_of(quick=quick)
    shapes = [(short, 4, 4), (long, 2, 2)] if quick else [(short, 32, 32), (short, 1024, 256), (long, 8, 8), (long, 128, 32)]
    return [Case(*shape, source) for source in ("texts", "ids") for shape in shapes]


@dataclass
class Run:
    """See the module."""

    plan: Plan
    model: BuiltModel
    ends_at: float
    """By ``time.monotonic()``."""
    found: dict[str, Any] = field(default_factory=dict)
    problems: list[dict[str, str]] = field(default_factory=list)
    open: dict[str, System] = field(default_factory=dict)
    """The systems that could be loaded."""

    def write(self) -> None:
        """The result so far; the file is always whole."""
        path = Path(self.plan.result)
        path.with_suffix(".new").write_text(json.dumps({**self.found, "problems": self.problems}), encoding="utf-8")
        path.with_suffix(".new").replace(path)

    @contextlib.contextmanager
    def noting(self, name: str) -> Iterator[None]:
        """What fails in here is noted, once for each name, and the rest goes on."""
        try:
            yield
        except Exception as problem:
            if all(each["part"] != name for each in self.problems):
                traceback.print_exc()
                self.problems.append({"part": name, "error": f"{type(problem).__name__}: {problem}"[:1000]})

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """As ``noting``; also told on stderr with the time that it took, and written."""
        began = time.monotonic()
        with self.noting(name):
            yield
        tell(f"{self.plan.model}: {name}, {time.monotonic() - began:.1f} s")
        self.write()

    def rounds(self) -> Iterator[int]:
        """At least one; then until the time is over."""
        for number in range(self.plan.rounds):
            if number and time.monotonic() > self.ends_at:
                return
            yield number

    def systems_for(self, source: str) -> list[str]:
        """Names of the open systems that take texts, or ids."""
        return [name for name, each in self.open.items() if source == "texts" or each.from_ids is not None]

    def encode(self, name: str, inputs: list[Any], source: str, batch: int) -> None:
        """One call of a system."""
        system = self.open[name]
        if source == "texts":
            system.from_texts(inputs, batch)
        else:
            assert system.from_ids is not None
            system.from_ids(inputs, batch)


def tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
